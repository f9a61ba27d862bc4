"""What the credit step is told by the configuration, as one frozen value."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from omegaconf import OmegaConf

from verl_credit.config.pipeline_settings import PipelineSettings
from verl_credit.names import ADV_ESTIMATOR, LOSS_MODE


@dataclass(frozen=True)
class CreditSettings:
    """Resolved keys; the names are those of the configuration."""

    adv_estimator: str
    info_gain_norm_mode: str
    info_gain_type: str
    info_gain_first_turn: str
    info_gain_context: str
    info_gain_template: str
    info_gain_on_error: str
    gamma: float
    adv_rescale_alpha: float
    norm_adv_by_std_in_grpo: bool
    ratio_level: str
    dynamic_clip: bool
    clip_beta: float
    info_gain_prefix: str = ""
    info_gain_scorer: str = "branch"
    info_gain_aliases: str = "max"
    info_gain_every: int = 1
    info_gain_warmup_steps: int = 0
    curriculum_gain: tuple[float, float] = (1.0, 1.0)
    curriculum_outcome: tuple[float, float] = (1.0, 1.0)
    chat_template_kwargs: dict = field(default_factory=dict)
    """``data.apply_chat_template_kwargs``: what the rollouts' chat template is told (``enable_thinking``)."""
    attention: str | None = None
    preset: str | None = None
    preset_overrides: tuple[str, ...] = ()
    pipeline: PipelineSettings = field(default_factory=PipelineSettings)

    @classmethod
    def from_config(cls, config) -> CreditSettings:
        algorithm, loss = config.algorithm, config.actor_rollout_ref.actor.policy_loss
        ours = loss.loss_mode == LOSS_MODE
        return cls(
            adv_estimator=str(algorithm.adv_estimator),
            info_gain_norm_mode=algorithm.info_gain_norm_mode,
            info_gain_type=algorithm.info_gain_type,
            info_gain_first_turn=algorithm.info_gain_first_turn,
            info_gain_context=algorithm.info_gain_context,
            info_gain_template=algorithm.info_gain_template,
            info_gain_prefix=algorithm.info_gain_prefix,
            info_gain_on_error=algorithm.info_gain_on_error,
            gamma=float(algorithm.gamma),
            adv_rescale_alpha=float(algorithm.adv_rescale_alpha),
            norm_adv_by_std_in_grpo=bool(algorithm.norm_adv_by_std_in_grpo),
            ratio_level=loss.ratio_level if ours else "token",
            dynamic_clip=bool(loss.dynamic_clip) if ours else False,
            clip_beta=float(loss.clip_beta) if ours else 0.0,
            info_gain_scorer=algorithm.info_gain_scorer,
            info_gain_aliases=algorithm.info_gain_aliases,
            info_gain_every=int(algorithm.info_gain_every),
            info_gain_warmup_steps=int(algorithm.info_gain_warmup_steps),
            curriculum_gain=tuple(map(float, algorithm.info_gain_curriculum.gain)),
            curriculum_outcome=tuple(map(float, algorithm.info_gain_curriculum.outcome)),
            chat_template_kwargs=_plain(config.data.get("apply_chat_template_kwargs")),
            attention=config.actor_rollout_ref.model.override_config.get("attn_implementation"),
            preset=config.credit_preset,
            preset_overrides=tuple(config.credit_overrides),
            pipeline=PipelineSettings.from_config(config),
        )

    @property
    def turn_estimator(self) -> bool:
        """Ours computes the advantages, not one of verl's."""
        return self.adv_estimator == ADV_ESTIMATOR

    @property
    def scores_gain(self) -> bool:
        """Mode ``none`` and verl's own estimators need no information gain, so none is computed."""
        return self.turn_estimator and self.info_gain_norm_mode != "none"

    def scores_at(self, step: int) -> bool:
        """Gains are measured at this step (counted from 1); other steps are plain GRPO."""
        after = step - self.info_gain_warmup_steps
        return self.scores_gain and after >= 1 and (after - 1) % self.info_gain_every == 0

    def curriculum_at(self, step: int, steps: int) -> tuple[float, float]:
        """(weight of gains, weight of outcomes) at a step that measures gains: linear from the first such step to the last
        of ``steps``. Other steps are plain GRPO: both are 1."""
        if not self.scores_at(step):
            return 1.0, 1.0
        first = self.info_gain_warmup_steps + 1
        share = 0.0 if steps <= first else min(1.0, (step - first) / (steps - first))
        return tuple(a + share * (b - a) for a, b in (self.curriculum_gain, self.curriculum_outcome))

    def banner(self) -> str:
        """One line that says what is active."""
        parts = []
        if self.preset:
            changed = f" (overridden: {', '.join(self.preset_overrides)})" if self.preset_overrides else ""
            parts.append(f"preset={self.preset}{changed}")
        parts.append(
            f"advantage={self.info_gain_norm_mode if self.turn_estimator else f'verl {self.adv_estimator}'}"
        )
        if self.turn_estimator:
            parts += self.pipeline.banner()
        if self.scores_gain:
            parts.append(
                f"gain={self.info_gain_type}/{self.info_gain_context}/first_turn={self.info_gain_first_turn} "
                f"scorer={self.info_gain_scorer} gold={self.info_gain_aliases}"
            )
            if self.info_gain_every > 1 or self.info_gain_warmup_steps:
                parts.append(f"gain every {self.info_gain_every} steps after {self.info_gain_warmup_steps}")
            if self.curriculum_gain != (1, 1) or self.curriculum_outcome != (1, 1):
                parts.append(f"curriculum gain={self.curriculum_gain} outcome={self.curriculum_outcome}")
            parts.append(f"gamma={self.gamma:g} alpha={self.adv_rescale_alpha:g}")
        parts.append(f"loss ratio={self.ratio_level} dynamic_clip={self.dynamic_clip}")
        if self.dynamic_clip:
            parts.append(f"clip_beta={self.clip_beta:g}")
        return "verl_credit: " + " | ".join(parts)

    def as_dict(self) -> dict:
        return asdict(self)


def _plain(node) -> dict:
    return (OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node) or {}
