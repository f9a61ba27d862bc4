"""Checks that verl's reward manager hands on what the reward function reads, and leaves outcomes as MaxRL needs them."""

from __future__ import annotations

from collections.abc import Mapping

from verl_credit.config.fit import DEFAULT
from verl_credit.config.resolved import Config, Tree, select
from verl_credit.errors import ConfigError
from verl_credit.recipe.agent_loops import may_call

MANAGER = "reward.reward_manager"
HAND_ON = ("naive", "rate_limited", "remote")
"""The managers of verl 0.9.1 that hand the agent loop's record (``tool_extra_fields``) to the reward function."""

OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg.enable"


def validate_reward_manager(config: Tree) -> None:
    """Raises ConfigError for the first fault."""
    if not isinstance(config.reward, Mapping):
        raise ConfigError.of(config, "reward", accepted="a section with keys")
    manager = config.reward.reward_manager
    if manager.source != "register":
        return  # the outcomes of a user's manager are checked in every step (`checks`)
    if may_call(config) and manager.name not in HAND_ON:
        use = "it does not hand the agent loop's record to the reward function, so that an answer in what a tool returns "
        use += f"would count as the policy's; use one of {', '.join(HAND_ON)}"
        calls = "search.max_searches" if config.search.max_searches else DEFAULT
        raise ConfigError.of(config, f"{MANAGER}.name", calls, accepted=use)
    if manager.name == "dapo" and config.algorithm.advantage_mode == "maxrl" and _overlong(config):
        use = "maxrl divides by the mean outcome, and the penalty makes outcomes of long rows negative; set it to false"
        raise ConfigError.of(config, OVERLONG, f"{MANAGER}.name", "algorithm.advantage_mode", accepted=use)


def overlong_unread(config: Config) -> list[str]:
    """Returns the overlong penalty's keys where the manager does not read them."""
    manager = config.reward.reward_manager
    if not _overlong(config) or manager.source != "register" or manager.name == "dapo":
        return []
    return [f"{OVERLONG}=true: {MANAGER}.name={manager.name} knows no penalty for long rows"]


def _overlong(config: Config) -> bool:
    return bool(select(config, OVERLONG))
