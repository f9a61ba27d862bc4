"""The configuration of the credit step: the declared keys, resolved, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import DictConfig

from verl_credit.config.keys import LOSS, Algorithm, Environment, PolicyLoss, Search, chosen, read_section
from verl_credit.config.resolved import Tree, data, value_at
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
    environment: Environment = field(default_factory=Environment)
    chat_template_kwargs: dict = field(default_factory=dict)
    """``data.apply_chat_template_kwargs``, the arguments of the rollouts' chat template (``enable_thinking``)."""
    attention: str | None = None
    preset: str | None = None
    preset_overrides: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, config: DictConfig | Tree) -> CreditSettings:
        """Reads the settings. Raises ConfigError."""
        ours = value_at(config, f"{LOSS}.loss_mode") == LOSS_MODE
        return cls(
            algorithm=read_section(Algorithm, config),
            loss=read_section(PolicyLoss, config) if ours else None,
            search=read_section(Search, config),
            environment=read_section(Environment, config),
            chat_template_kwargs=data(value_at(config, "data.apply_chat_template_kwargs")) or {},
            attention=value_at(config, ATTENTION),
            preset=config["credit_preset"],
            preset_overrides=tuple(config["credit_overrides"]),
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
        gain, outcome = (a + share * (b - a) for a, b in (curriculum.gain, curriculum.outcome))
        return gain, outcome

    def banner(self) -> str:
        """Returns a line with the preset, the advantage, and the keys of credit that differ from their defaults."""
        a, parts = self.algorithm, []
        if self.preset:
            changed = f" (overridden: {', '.join(self.preset_overrides)})" if self.preset_overrides else ""
            parts.append(f"preset={self.preset}{changed}")
        name = a.info_gain_norm_mode if self.turn_estimator else f"verl {a.adv_estimator}"
        parts.append(f"advantage={name}")
        parts += [key.written(value) for key, value in chosen(self.algorithm, self.loss) if key.is_read(self)]
        return "verl_credit: " + " | ".join(parts)
