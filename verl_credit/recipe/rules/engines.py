"""Refuses an engine or attention that the actor cannot use, and a rollout engine with unusable tools or rewards."""

from __future__ import annotations

from verl_credit.config.fit import DEFAULT, ULYSSES
from verl_credit.config.resolved import Tree, select
from verl_credit.config.settings import ATTENTION, CreditSettings
from verl_credit.errors import ConfigError
from verl_credit.names import AGENTS, ROLLOUT_NAME
from verl_credit.policy.attention.implementation import NAMES
from verl_credit.recipe.agent_loops import own_loops, validate_other_tools
from verl_credit.recipe.rules.reward import validate_reward_manager
from verl_credit.turns.scorers import SCORERS

REMOVE_PADDING = "actor_rollout_ref.model.use_remove_padding"
STRATEGIES = ("fsdp", "fsdp2")
ENGINES = (ROLLOUT_NAME, "vllm")


def validate_actor(config: Tree, settings: CreditSettings) -> None:
    """Raises ConfigError for the first fault."""
    attention = select(config, ATTENTION)
    model, actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    if actor.strategy not in STRATEGIES:
        use = "built for and tested with verl's FSDP engine, whichever algorithm.info_gain_scorer; use fsdp2 or fsdp"
        raise ConfigError.of(config, "actor_rollout_ref.actor.strategy", accepted=use)
    if attention in NAMES:
        if not model.use_remove_padding:
            use = f"that attention serves packed rows: set {REMOVE_PADDING}=true"
            raise ConfigError.of(config, REMOVE_PADDING, ATTENTION, accepted=use)
        _one_rank_a_sequence(config, attention)
        if model.get("use_fused_kernels", False):
            use = "verl's fused head does not hand the rows' places on to the model; set it to false"
            raise ConfigError.of(config, "actor_rollout_ref.model.use_fused_kernels", ATTENTION, accepted=use)
    if settings.uses_scorer:
        SCORERS[settings.algorithm.info_gain_scorer].needs(config)


def _one_rank_a_sequence(config: Tree, attention: str) -> None:
    for role in ("actor", "ref"):
        for name in (f"{role}.{ULYSSES}", f"{role}.fsdp_config.{ULYSSES}"):
            ranks = select(config.actor_rollout_ref, name) or 1
            if ranks > 1:
                use = f"set it to 1, or {ATTENTION}=flash_attention_2 and algorithm.info_gain_scorer=rows"
                use = f"attention over several ranks is not built; {use}"
                raise ConfigError.of(config, f"actor_rollout_ref.{name}", ATTENTION, accepted=use)


def validate_rollout(config: Tree, settings: CreditSettings) -> None:
    """Raises ConfigError for the first fault."""
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
