"""Tools beside the search: which are given, and when the agent loop would offer none of them."""

from __future__ import annotations

from omegaconf import DictConfig

from verl_credit.errors import ConfigError

MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"


KEYS = ("tool_config_path", "function_tool_path")


FAILED = "Error executing tool"  # how verl's observation of a tool that raised begins
BAD_JSON = "Invalid JSON in arguments for"  # ... of a call that verl cannot read


def tools_given(config: DictConfig) -> dict[str, str]:
    """Key -> path of those that are set."""
    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    return {f"{MULTI_TURN}.{key}": multi_turn[key] for key in KEYS if multi_turn.get(key)}


def validate_other_tools(config: DictConfig) -> None:
    """Raises ConfigError where the agent loop would offer none of them."""
    given = tools_given(config)
    if given and not config.search.max_searches:
        key = next(iter(given))
        use = f"there is one turn and no call, so that its tools would never be used; set {key}=null"
        raise ConfigError.of(config, key, "search.max_searches", accepted=use)
