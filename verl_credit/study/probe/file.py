"""The keys of a probe's file: every key once, with its default and what it does (docs/probe.md prints them)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from verl_credit.config.keys.section import Part
from verl_credit.credit.entropy_gradient import PER_SEQUENCE, PER_SEQUENCE_MEAN, PER_TOKEN, RESIDUAL_MU

ESTIMANDS = {
    PER_SEQUENCE: "nats per rollout",
    PER_SEQUENCE_MEAN: "nats, mean of rollouts' means",
    PER_TOKEN: "nats per token",
}
"""Units; docs/probe.md defines the three."""
Count = Annotated[int, Field(ge=1)]
Above0 = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class EstimatorSettings(Part):
    """``estimator``"""

    x_estimator_mode: Literal["naive", "rb_residual"] = "rb_residual"
    """naive (-log q of the sampled tokens) or rb_residual (the entropy of every state, with a baseline)"""
    estimand: Literal["per_sequence", "per_sequence_mean", "per_token"] = PER_TOKEN
    """per_sequence, per_sequence_mean or per_token"""
    baseline: Literal["none", "constant", "residual_mu"] = "residual_mu"
    """of rb_residual: none (b_j = H_j), constant, or residual_mu (one mean per place); means are of all other prompts"""

    @model_validator(mode="after")
    def _naive(self) -> EstimatorSettings:
        naive = "x_estimator_mode=naive"
        if self.x_estimator_mode == "naive" and self.baseline != RESIDUAL_MU:
            raise ValueError(f"baseline={self.baseline} is not read by {naive}")
        if self.x_estimator_mode == "naive" and self.estimand == PER_SEQUENCE_MEAN:
            why = "-S / T estimates another quantity than Σ H / T, because T depends on the tokens"
            use = "take rb_residual, or per_sequence or per_token"
            raise ValueError(f"{naive} with estimand=per_sequence_mean: {why}; {use}")
        return self


class GenerationSettings(Part):
    """``generation``"""

    rb_requires_grad: bool = True
    """true: the pathwise term Σ ∇H_k is part of rb_residual; false leaves it out, for comparison, and X is biased"""
    source: Literal["run", "stored"] = "run"
    """run: the run's own engine samples new rollouts from the checkpoint; stored: rollouts of keep_rollouts.groups=null"""


class BatchSettings(Part):
    """``batch_config``"""

    B_E: Count = 32
    """a whole number of at least 1: prompts whose rollouts measure the entropy (2 for a standard error)"""
    B_U: Count | None = None
    """a whole number of at least 1: prompts whose rollouts make the update, none of them in E; null: the run's mini-batch"""
    seed: Annotated[int, Field(ge=0)] = 42
    """a whole number of at least 0, for the division of prompts into E and U"""


class UpdateSettings(Part):
    """``update``"""

    lr: Above0 | None = None
    """learning rate, a number above 0; null: the rate of the checkpoint's optimiser"""


class TruthSettings(Part):
    """``truth``"""

    etas: Annotated[list[Above0], Field(min_length=2)] = Field(
        default_factory=lambda: [round(10**x, 4) for x in (-0.5, -0.25, 0.0, 0.25, 0.5)]
    )
    """at least two numbers above 0: where the change is measured, in training learning rates; default: a decade around 1"""


class RuntimeSettings(Part):
    """``runtime``"""

    dtype: Literal["float64", "float32"] = "float64"
    """the type of parameters and forward; softmax and entropy are always float64"""
    device: str = "cpu"
    """cpu, cuda or cuda:N"""
    micro_batch: Count = 16
    """a whole number of at least 1: rollouts per forward; changes memory and time, never a result"""


class ProbeSettings(Part):
    """A probe's file."""

    estimator: EstimatorSettings = Field(default_factory=EstimatorSettings)
    """a mapping: x_estimator_mode, estimand, baseline"""
    generation: GenerationSettings = Field(default_factory=GenerationSettings)
    """a mapping: rb_requires_grad, source"""
    batch_config: BatchSettings = Field(default_factory=BatchSettings)
    """a mapping: B_E, B_U, seed"""
    update: UpdateSettings = Field(default_factory=UpdateSettings)
    """a mapping: lr"""
    truth: TruthSettings = Field(default_factory=TruthSettings)
    """a mapping: etas"""
    runtime: RuntimeSettings = Field(default_factory=RuntimeSettings)
    """a mapping: dtype, device, micro_batch"""

    @model_validator(mode="after")
    def _pathwise(self) -> ProbeSettings:
        if self.estimator.x_estimator_mode == "naive" and not self.generation.rb_requires_grad:
            raise ValueError(
                "generation.rb_requires_grad=false with estimator.x_estimator_mode=naive: naive has no pathwise term"
            )
        return self

    def banner(self) -> str:
        """Returns a line with the settings in use, which is printed before anything heavy starts."""
        e = self.estimator
        baseline = "leave one out" if e.x_estimator_mode == "naive" else e.baseline
        line = f"X={e.x_estimator_mode} baseline={baseline} estimand={e.estimand}"
        return line if self.generation.rb_requires_grad else f"{line} WITHOUT the pathwise term: X is biased"
