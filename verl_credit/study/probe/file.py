"""The keys of a probe's file: every key once, with its default and what it does (docs/probe.md prints them)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from verl_credit.config.gone import no_more
from verl_credit.config.keys.section import Part

_ONE = no_more("the entropy of every state with one mean per place as baseline is the estimator")
GONE = {
    "estimator": {"x_estimator_mode": _ONE, "baseline": _ONE, "estimand": no_more("H is in nats per token")},
    "generation": {"rb_requires_grad": no_more("X is biased without the pathwise term")},
}
"""Keys that a probe's file had, by section."""
Count = Annotated[int, Field(ge=1)]
Above0 = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class GenerationSettings(Part):
    """``generation``"""

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

    generation: GenerationSettings = Field(default_factory=GenerationSettings)
    """a mapping: source"""
    batch_config: BatchSettings = Field(default_factory=BatchSettings)
    """a mapping: B_E, B_U, seed"""
    update: UpdateSettings = Field(default_factory=UpdateSettings)
    """a mapping: lr"""
    truth: TruthSettings = Field(default_factory=TruthSettings)
    """a mapping: etas"""
    runtime: RuntimeSettings = Field(default_factory=RuntimeSettings)
    """a mapping: dtype, device, micro_batch"""

    @model_validator(mode="before")
    @classmethod
    def _gone(cls, tree: Any) -> Any:
        """Refuses a key of before with the reason why it went."""
        for section, keys in GONE.items():
            given = tree.get(section) if isinstance(tree, dict) else None
            for key in keys if isinstance(given, dict) else ():
                if key in given:
                    raise ValueError(f"{section}.{key}={given[key]}: {keys[key]}")
        return tree
