"""What the scorers of information gain cannot do, refused with the reason before anything heavy starts."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from verl_credit.host.compose import ConfigError
from verl_credit.host.fields import ADV_ESTIMATOR

SCORERS = ("branch", "rows", "server")
SERVERS = ("hf", "vllm")  # rollout engines whose servers give log-probs of prompts
ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"
OURS = ("auto", "credit_varlen", "credit_flex", "credit_sdpa")
STRATEGIES = ("fsdp", "fsdp2")


def validate_scorer(config: DictConfig) -> None:
    """Raise ConfigError for the first thing that is wrong."""
    attention = OmegaConf.select(config, ATTENTION)
    model, actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    sequence_parallel = OmegaConf.select(actor, "ulysses_sequence_parallel_size") or 1
    if attention in OURS:
        if not model.use_remove_padding:
            raise ConfigError(
                f"{ATTENTION}={attention} serves packed rows: set actor_rollout_ref.model.use_remove_padding=true"
            )
        if sequence_parallel > 1:
            raise ConfigError(
                f"{ATTENTION}={attention} with actor_rollout_ref.actor.ulysses_sequence_parallel_size="
                f"{sequence_parallel}: attention over several ranks is not built; set it to 1, or {ATTENTION}="
                "flash_attention_2 and algorithm.info_gain_scorer=rows"
            )
        if actor.strategy not in STRATEGIES:
            raise ConfigError(
                f"{ATTENTION}={attention} with actor_rollout_ref.actor.strategy={actor.strategy}: built for verl's FSDP "
                f"engine ({', '.join(STRATEGIES)}), which says where the rows lie; use another attention and "
                "algorithm.info_gain_scorer=rows"
            )
        if model.get("use_fused_kernels", False):
            raise ConfigError(
                f"{ATTENTION}={attention} with actor_rollout_ref.model.use_fused_kernels=true: verl's fused head does not "
                "hand the rows' places on to the model; set it to false"
            )
    gains = config.algorithm.adv_estimator == ADV_ESTIMATOR and config.algorithm.info_gain_norm_mode != "none"
    if gains and config.algorithm.info_gain_scorer == "branch":
        _branch(config, attention)
    rollout = config.actor_rollout_ref.rollout.name
    if gains and config.algorithm.info_gain_scorer == "server" and rollout not in SERVERS:
        raise ConfigError(
            f"algorithm.info_gain_scorer=server with actor_rollout_ref.rollout.name={rollout}: built for "
            f"{' and '.join(SERVERS)}; use branch or rows"
        )


def _branch(config: DictConfig, attention: str | None) -> None:
    rows = "or algorithm.info_gain_scorer=rows"
    if attention not in OURS:
        raise ConfigError(
            f"algorithm.info_gain_scorer=branch with {ATTENTION}={attention}: only {', '.join(OURS)} let an answer see "
            f"its own context alone; set {ATTENTION}=auto, {rows}"
        )
    correction = config.algorithm.get("rollout_correction") or {}
    if correction.get("bypass_mode", False):
        raise ConfigError(
            "algorithm.info_gain_scorer=branch with algorithm.rollout_correction.bypass_mode=true: answers ride on the "
            f"old_log_probs forward, which is then not made; set bypass_mode=false, {rows}"
        )
