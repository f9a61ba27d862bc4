"""Tools beside the search: which are given, and when the agent loop would offer none of them."""

from __future__ import annotations

from verl_credit.config.fit import DEFAULT
from verl_credit.config.resolved import Config, Tree, select
from verl_credit.errors import ConfigError
from verl_credit.names import AGENT_NAME, TURN_AGENT
from verl_credit.recipe.agent_loops import may_call

MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"


KEYS = ("tool_config_path", "function_tool_path")


FAILED = "Error executing tool"  # how verl's observation of a tool that raised begins
BAD_JSON = "Invalid JSON in arguments for"  # ... of a call that verl cannot read


def tools_given(config: Config) -> dict[str, str]:
    """Key -> path of those that are set."""
    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    return {f"{MULTI_TURN}.{key}": multi_turn[key] for key in KEYS if multi_turn.get(key)}


def validate_other_tools(config: Tree) -> None:
    """Raises ConfigError where the agent loop would offer none of them, or has none to offer."""
    given = tools_given(config)
    if given and not may_call(config):
        key = next(iter(given))
        use = f"there is one turn and no call, so that its tools would never be used; set {DEFAULT}={TURN_AGENT}, which "
        use += f"calls them without a search, or {key}=null"
        raise ConfigError.of(config, key, "search.max_searches", accepted=use)
    if not given and select(config, DEFAULT) == TURN_AGENT:
        files = " and ".join(f"{MULTI_TURN}.{key}" for key in KEYS)
        use = (
            f"it calls the tools that {files} name, and both are null; give one of them, or use {AGENT_NAME}"
        )
        raise ConfigError.of(config, DEFAULT, accepted=use)
