"""The configuration of the credit step: the declared keys, resolved, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass, field

from verl_credit.config.keys import LOSS, Algorithm, PolicyLoss, Search, read_section
from verl_credit.config.resolved import Config, data, select
from verl_credit.credit.token.token_transforms import TRANSFORMS
from verl_credit.credit.turn.value_providers import regressed
from verl_credit.names import ADV_ESTIMATOR, LOSS_MODE
from verl_credit.policy.families import ATTENTION

INFO_GAIN = "info_gain"
"""The turn signal that is scored with the policy's forward, in the steps that `scores_at` names."""


@dataclass(frozen=True)
class CreditSettings:
    algorithm: Algorithm = field(default_factory=Algorithm)
    loss: PolicyLoss | None = None
    """Our loss's keys; None for a loss of verl's."""
    search: Search = field(default_factory=Search)
    chat_template_kwargs: dict = field(default_factory=dict)
    """``data.apply_chat_template_kwargs``, the arguments of the rollouts' chat template (``enable_thinking``)."""
    attention: str | None = None
    preset: str | None = None
    preset_overrides: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, config: Config) -> CreditSettings:
        """Reads the settings. Raises ConfigError."""
        ours = select(config, f"{LOSS}.loss_mode") == LOSS_MODE
        return cls(
            algorithm=read_section(Algorithm, config),
            loss=read_section(PolicyLoss, config) if ours else None,
            search=read_section(Search, config),
            chat_template_kwargs=data(config.data.get("apply_chat_template_kwargs")) or {},
            attention=select(config, ATTENTION),
            preset=config.credit_preset,
            preset_overrides=tuple(config.credit_overrides),
        )

    @property
    def turn_estimator(self) -> bool:
        """Our estimator, not one of verl's, computes the advantages."""
        return self.algorithm.adv_estimator == ADV_ESTIMATOR

    @property
    def turn_signals(self) -> dict[str, float]:
        """The weights of the signals that reward tool turns; empty where none is read (mode ``none``, verl's estimators)."""
        return self.algorithm.signal_weights if self.turn_estimator else {}

    @property
    def scores_gain(self) -> bool:
        """Information gain is measured, by `info_gain_scorer`, only where it is one of the turn signals."""
        return INFO_GAIN in self.turn_signals

    @property
    def ratio_level(self) -> str:
        return "token" if self.loss is None else self.loss.ratio_level

    @property
    def dynamic_clip(self) -> bool:
        return self.loss is not None and bool(self.loss.dynamic_clip)

    @property
    def clip_beta(self) -> float:
        return 0.0 if self.loss is None else self.loss.clip_beta

    @property
    def turn_options(self) -> dict:
        """The turn mode's options from the keys that it reads and from ``algorithm.turn_params``."""
        a = self.algorithm
        known = {
            "gamma": a.gamma,
            "lam": a.lam,
            "alpha": a.adv_rescale_alpha,
            "clip_beta": self.clip_beta,
            "norm_by_std": a.norm_adv_by_std_in_grpo,
        }
        return {name: value for name, value in known.items() if name in a.turn_mode.options} | a.turn_params

    def scores_at(self, step: int) -> bool:
        """Gains are measured at this step (counted from 1); other steps are plain GRPO."""
        after = step - self.algorithm.info_gain_warmup_steps
        return self.scores_gain and after >= 1 and (after - 1) % self.algorithm.info_gain_every == 0

    def signals_at(self, step: int) -> set[str]:
        """Names of the turn signals that are measured at this step."""
        return {name for name in self.turn_signals if name != INFO_GAIN or self.scores_at(step)}

    def curriculum_at(self, step: int, steps: int) -> tuple[float, float]:
        """Returns (weight of gains, weight of outcomes) at a step that measures gains, linear from the first such step to
        the last of ``steps``. Other steps are plain GRPO with weights 1."""
        if not self.scores_at(step):
            return 1.0, 1.0
        first = self.algorithm.info_gain_warmup_steps + 1
        share = 0.0 if steps <= first else min(1.0, (step - first) / (steps - first))
        curriculum = self.algorithm.info_gain_curriculum
        return tuple(a + share * (b - a) for a, b in (curriculum.gain, curriculum.outcome))

    def banner(self) -> str:
        """Returns a line that names the active parts."""
        a, parts = self.algorithm, []
        if self.preset:
            changed = f" (overridden: {', '.join(self.preset_overrides)})" if self.preset_overrides else ""
            parts.append(f"preset={self.preset}{changed}")
        name = a.info_gain_norm_mode if self.turn_estimator else f"verl {a.adv_estimator}"
        parts.append(f"advantage={name}")
        if self.turn_estimator:
            parts += _pipeline(a)
        if self.scores_gain:
            parts.append(
                f"gain={a.info_gain_type}/{a.info_gain_context}/first_turn={a.info_gain_first_turn} "
                f"scorer={a.info_gain_scorer} gold={a.info_gain_aliases}"
            )
        if self.scores_gain and (a.info_gain_every > 1 or a.info_gain_warmup_steps):
            parts.append(f"gain every {a.info_gain_every} steps after {a.info_gain_warmup_steps}")
        if self.scores_gain:
            gain, outcome = a.info_gain_curriculum.gain, a.info_gain_curriculum.outcome
            if gain != (1, 1) or outcome != (1, 1):
                parts.append(f"curriculum gain={gain} outcome={outcome}")
            parts.append(f"gamma={a.gamma:g} alpha={a.adv_rescale_alpha:g}")
        parts.append(f"loss ratio={self.ratio_level} dynamic_clip={self.dynamic_clip}")
        if self.dynamic_clip:
            parts.append(f"clip_beta={self.clip_beta:g}")
        return "verl_credit: " + " | ".join(parts)


def _pipeline(a: Algorithm) -> list[str]:
    """Names the outcome and token levels in the order in which they act."""
    if a.algorithm_mode:
        return [f"algorithm={a.algorithm_mode}"]
    parts = [f"outcome={a.advantage_mode}"] if not a.canonical_transform else []
    if a.transform_mode != "none":
        parts.append(f"tokens={a.transform_mode}")
    if transform := TRANSFORMS.get(a.transform_mode):
        if transform.weighted:
            parts.append(f"uncertainty={a.uncertainty_kind} beta={a.gtpo.beta:g}")
        if transform.uses_sepa_controller:
            s = a.sepa
            parts.append(f"sepa={s.schedule}/{s.steps}+{s.delay_steps} gate={s.correct_rate_gate:g}")
        if transform.amplified:
            parts.append(f"hicra={a.hicra.alpha:g}")
        if transform.needs_planning:
            parts.append(f"planning={a.planning.detector}")
    if a.turn_values is not None:
        fit = f" ridge={a.turn_values_ridge:g} replay={a.turn_values_replay}"
        parts.append(f"values={a.turn_values}{fit if regressed(a.turn_values) else ''}")
    if a.tied_groups != "keep":
        parts.append(f"tied_groups={a.tied_groups}")
    return parts
