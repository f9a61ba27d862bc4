"""Rollout engine, tools, reward manager and the engine's longest sequence: what cannot work is refused with the reason."""

from __future__ import annotations

from verl_credit.config.fit import DEFAULT
from verl_credit.config.resolved import Tree, select
from verl_credit.config.settings import CreditSettings
from verl_credit.errors import ConfigError
from verl_credit.names import AGENTS, ROLLOUT_NAME
from verl_credit.recipe.agent_loops import own_loops, validate_other_tools
from verl_credit.recipe.rules.reward import validate_reward_manager
from verl_credit.turns.scorers import SCORERS

ENGINES = (ROLLOUT_NAME, "vllm")


def validate_rollout(config: Tree, settings: CreditSettings) -> None:
    """Raise ConfigError for the first thing that is wrong."""
    name = config.actor_rollout_ref.rollout.name
    if config.actor_rollout_ref.rollout.enable_rollout_routing_replay:
        use = "verl's FSDP engine replays no routes of experts, so that it would do nothing; set it to false"
        raise ConfigError.of(config, "actor_rollout_ref.rollout.enable_rollout_routing_replay", accepted=use)
    if name not in ENGINES:
        use = f"verl_credit is built for and tested with {' and '.join(ENGINES)}; whether turns keep their token "
        use += "budget and rows their log-probs with another engine has not been looked at"
        raise ConfigError.of(config, "actor_rollout_ref.rollout.name", accepted=use)
    own_loops(config)
    _scored_inside(config, settings)
    validate_other_tools(config)
    validate_reward_manager(config)


def _scored_inside(config: Tree, settings: CreditSettings) -> None:
    served = settings.scores_gain and SCORERS[settings.algorithm.info_gain_scorer].in_rollout
    if served and select(config, DEFAULT) not in AGENTS:
        use = f"the scores are asked for by {' and '.join(AGENTS)}; with an agent loop of your own take branch or rows"
        raise ConfigError.of(config, "algorithm.info_gain_scorer", DEFAULT, accepted=use)
