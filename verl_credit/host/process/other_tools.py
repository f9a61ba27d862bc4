"""Tools beside the search: loaded once before Ray starts, so that what verl's workers would stumble over ends the run here.

A call of one is a turn like any other: it counts against the turns that are allowed, and its gain is measured. What such a
tool raises verl turns into an observation. Whether that was the policy's mistake (a wrong argument) or the tool's, nothing
says; it is counted (``credit/tool/other_errors``).
"""

from __future__ import annotations

from omegaconf import DictConfig

from verl_credit.config.fit import turns_at_most
from verl_credit.errors import PreflightError
from verl_credit.recipe.agent_loops import KEYS, tools_given


def check_other_tools(config: DictConfig) -> list[str]:
    """Loads them as verl's workers will. Raises PreflightError for such as cannot be; a line that names the others."""
    from verl_credit.turns.search.protocol import SCHEMA

    given = tools_given(config)
    if not given:
        return []
    said = ", ".join(f"{key}={path}" for key, path in given.items())
    names = [tool.name for tool in _loaded(config, said)]
    if not names:
        raise PreflightError(f"{said}: holds no tool")
    search = SCHEMA["function"]["name"]
    if search in names and config.search.max_searches:
        raise PreflightError(
            f"{said}: a tool is called {search!r}, as the search tool is, which would take its place; rename it"
        )
    what = "tools beside the search" if config.search.max_searches else "tools"
    key, turns = turns_at_most(config)
    most = f"at most {key}={turns}" if turns else "as many as fit the row"
    return [
        f"{what}: {', '.join(names)}; their calls are turns ({most}), what they raise is shown to the policy "
        "(credit/tool/other_errors)"
    ]


def tool_schemas(config: DictConfig) -> list[dict]:
    """As the agent loop hands them to the chat template. Raises PreflightError as `check_other_tools` does."""
    given = tools_given(config)
    tools = _loaded(config, ", ".join(f"{key}={path}" for key, path in given.items())) if given else []
    return [tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for tool in tools]


def _loaded(config: DictConfig, said: str) -> list:
    from verl.tools.tool_registry import load_all_tools
    from verl.utils.import_utils import resolve_config_path

    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    try:
        paths = {key: multi_turn.get(key) and resolve_config_path(multi_turn[key]) for key in KEYS}
        return load_all_tools(**paths)
    except Exception as error:  # a user's module raises what it likes
        mcp = "; verl 0.9.1 has no MCP tools: type: native" if "ToolType" in str(error) else ""
        raise PreflightError(
            f"{said}: verl cannot load it ({type(error).__name__}: {' '.join(str(error).split())[:300]}){mcp}"
        ) from error
