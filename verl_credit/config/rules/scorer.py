"""What the scorers of information gain cannot do, refused with the reason before anything heavy starts."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from verl_credit.attention import NAMES
from verl_credit.config.rules.budget import ULYSSES
from verl_credit.errors import ConfigError
from verl_credit.names import ADV_ESTIMATOR

SCORERS = ("branch", "rows", "server")
ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"
BYPASS = "algorithm.rollout_correction.bypass_mode"
REMOVE_PADDING = "actor_rollout_ref.model.use_remove_padding"
STRATEGIES = ("fsdp", "fsdp2")


def validate_scorer(config: DictConfig) -> None:
    """Raise ConfigError for the first thing that is wrong."""
    attention = OmegaConf.select(config, ATTENTION)
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
    gains = config.algorithm.adv_estimator == ADV_ESTIMATOR and config.algorithm.info_gain_norm_mode != "none"
    if gains and config.algorithm.info_gain_scorer == "branch":
        _branch(config, attention)


def _one_rank_a_sequence(config: DictConfig, attention: str) -> None:
    for role in ("actor", "ref"):
        for name in (f"{role}.{ULYSSES}", f"{role}.fsdp_config.{ULYSSES}"):
            ranks = OmegaConf.select(config.actor_rollout_ref, name) or 1
            if ranks > 1:
                use = f"set it to 1, or {ATTENTION}=flash_attention_2 and algorithm.info_gain_scorer=rows"
                use = f"attention over several ranks is not built; {use}"
                raise ConfigError.of(config, f"actor_rollout_ref.{name}", ATTENTION, accepted=use)


def _branch(config: DictConfig, attention: str | None) -> None:
    rows = "or algorithm.info_gain_scorer=rows"
    if attention not in NAMES:
        use = f"only {', '.join(NAMES)} let an answer see its own context alone; set {ATTENTION}=auto, {rows}"
        raise ConfigError.of(config, ATTENTION, "algorithm.info_gain_scorer", accepted=use)
    correction = config.algorithm.get("rollout_correction") or {}
    if correction.get("bypass_mode", False):
        use = f"answers ride on the old_log_probs forward, which is then not made; set bypass_mode=false, {rows}"
        raise ConfigError.of(config, BYPASS, "algorithm.info_gain_scorer", accepted=use)
