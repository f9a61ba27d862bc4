"""What attention and the scorers of information gain cannot work with."""

from __future__ import annotations

from verl_credit.config.fit import ULYSSES
from verl_credit.config.resolved import Tree, select
from verl_credit.config.settings import ATTENTION, CreditSettings
from verl_credit.errors import ConfigError
from verl_credit.policy.attention import NAMES
from verl_credit.turns.scorers import SCORERS

REMOVE_PADDING = "actor_rollout_ref.model.use_remove_padding"
STRATEGIES = ("fsdp", "fsdp2")


def validate_scorer(config: Tree, settings: CreditSettings) -> None:
    """Raise ConfigError for the first thing that is wrong."""
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
