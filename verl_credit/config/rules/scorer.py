"""What the scorers of information gain cannot do, refused with the reason before anything heavy starts."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from verl_credit.attention import NAMES
from verl_credit.config.rules.budget import ULYSSES
from verl_credit.errors import ConfigError
from verl_credit.names import ADV_ESTIMATOR

SCORERS = ("branch", "rows", "server")
ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"
REMOVE_PADDING = "actor_rollout_ref.model.use_remove_padding"
STRATEGIES = ("fsdp", "fsdp2")


def validate_scorer(config: DictConfig) -> None:
    """Raise ConfigError for the first thing that is wrong."""
    attention = OmegaConf.select(config, ATTENTION)
    model, actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    if actor.strategy not in STRATEGIES:
        raise ConfigError(
            key="actor_rollout_ref.actor.strategy",
            value=actor.strategy,
            accepted="built for and tested with verl's FSDP engine, whichever algorithm.info_gain_scorer; "
            f"use {' or '.join(reversed(STRATEGIES))}",
        )
    if attention in NAMES:
        if not model.use_remove_padding:
            raise ConfigError(
                key=REMOVE_PADDING,
                value=model.use_remove_padding,
                beside={ATTENTION: attention},
                accepted=f"that attention serves packed rows: set {REMOVE_PADDING}=true",
            )
        _one_rank_a_sequence(config, attention)
        if model.get("use_fused_kernels", False):
            raise ConfigError(
                key="actor_rollout_ref.model.use_fused_kernels",
                value=True,
                beside={ATTENTION: attention},
                accepted="verl's fused head does not hand the rows' places on to the model; set it to false",
            )
    gains = config.algorithm.adv_estimator == ADV_ESTIMATOR and config.algorithm.info_gain_norm_mode != "none"
    if gains and config.algorithm.info_gain_scorer == "branch":
        _branch(config, attention)


def _one_rank_a_sequence(config: DictConfig, attention: str) -> None:
    for role in ("actor", "ref"):
        for name in (f"{role}.{ULYSSES}", f"{role}.fsdp_config.{ULYSSES}"):
            ranks = OmegaConf.select(config.actor_rollout_ref, name) or 1
            if ranks > 1:
                raise ConfigError(
                    key=f"actor_rollout_ref.{name}",
                    value=ranks,
                    beside={ATTENTION: attention},
                    accepted="attention over several ranks is not built; set it to 1, or "
                    f"{ATTENTION}=flash_attention_2 and algorithm.info_gain_scorer=rows",
                )


def _branch(config: DictConfig, attention: str | None) -> None:
    rows = "or algorithm.info_gain_scorer=rows"
    if attention not in NAMES:
        raise ConfigError(
            key=ATTENTION,
            value=attention,
            beside={"algorithm.info_gain_scorer": "branch"},
            accepted=f"only {', '.join(NAMES)} let an answer see its own context alone; set {ATTENTION}=auto, {rows}",
        )
    correction = config.algorithm.get("rollout_correction") or {}
    if correction.get("bypass_mode", False):
        raise ConfigError(
            key="algorithm.rollout_correction.bypass_mode",
            value=True,
            beside={"algorithm.info_gain_scorer": "branch"},
            accepted=f"answers ride on the old_log_probs forward, which is then not made; set bypass_mode=false, {rows}",
        )
