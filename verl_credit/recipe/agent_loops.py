"""Agent loops that the rows of a recipe may name, and the tools beside the search that these may call."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_credit.config.fit import DEFAULT
from verl_credit.config.resolved import data, select
from verl_credit.errors import ConfigError
from verl_credit.names import AGENT_NAME, AGENTS, ENV_AGENT, LOOP_MANAGER, OUR_MANAGER, TURN_AGENT

MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
FORMAT, AT_ONCE = f"{MULTI_TURN}.format", f"{MULTI_TURN}.max_parallel_calls"
"""How a call is written, and the calls of a turn that are made; ``auto`` is decided by the chat template."""
KEYS = ("tool_config_path", "function_tool_path")
VERLS_TOOL_LOOP = "tool_agent"
LISTED = "actor_rollout_ref.rollout.agent.agent_loop_config_path"


def another_manager(config: DictConfig) -> bool:
    """Is the manager of agent loops somebody else's? It starts agents of its own, whatever our keys and rows name."""
    return select(config, LOOP_MANAGER) not in (None, OUR_MANAGER)


def may_call(config: DictConfig) -> bool:
    """May a rollout call a tool? The search agent without searches has one turn and offers none."""
    return (
        another_manager(config) or bool(config.search.max_searches) or select(config, DEFAULT) != AGENT_NAME
    )


def agents_of_rows(config: DictConfig, *, tools: bool) -> tuple[str, ...]:
    """Returns the names that a row's column ``agent_name`` may have. Raises ConfigError as `own_loops` does.

    ``tools``: the recipe names tools. Without searches the search agent would not call them.
    """
    if select(config, DEFAULT) == ENV_AGENT:
        return (ENV_AGENT, *own_loops(config))
    searches = bool(config.search.max_searches) or not may_call(config)
    ours = [name for name, use in ((AGENT_NAME, searches), (TURN_AGENT, tools)) if use]
    return tuple(dict.fromkeys([*ours, *own_loops(config), *loops_by_mask(config)]))


def loops_by_mask(config: DictConfig) -> tuple[str, ...]:
    """verl's loop with tools, where the recipe names some, and turns may follow from the mask (`algorithm.turn_ids`)."""
    masked = config.algorithm.turn_ids != "loop" and tools_given(config)
    return (VERLS_TOOL_LOOP,) if masked else ()


def own_loops(config: DictConfig) -> tuple[str, ...]:
    """Returns the names of the agent loops in the user's file. Raises ConfigError for a file that verl could not read."""
    path = select(config, LISTED)
    return loops_in(path) if path else ()


def loops_in(path: str) -> tuple[str, ...]:
    try:
        listed = OmegaConf.load(Path(path))
        names = tuple(str(entry["name"]) for entry in data(listed) if entry["_target_"])
    except Exception as error:  # YAML and OmegaConf raise arbitrary exceptions
        use = "expected a YAML file with a list of {name: .., _target_: my_module.MyAgentLoop} (docs/agent-loops.md); "
        use += f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ConfigError(key=LISTED, value=path, accepted=use) from error
    if taken := sorted({*names} & {*AGENTS}):
        use = f"it would replace {', '.join(taken)}; rename your agent loop"
        raise ConfigError(key=LISTED, value=path, accepted=use)
    return names


def tools_given(config: DictConfig) -> dict[str, str]:
    """Maps the keys of tool files that are set to their paths."""
    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    return {f"{MULTI_TURN}.{key}": multi_turn[key] for key in KEYS if multi_turn.get(key)}
