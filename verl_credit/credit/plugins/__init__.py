"""A user's own operators, named by dotted path in the configuration."""

from verl_credit.credit.plugins.calls import TurnInputs, run_algorithm, run_transform, run_uncertainty
from verl_credit.credit.plugins.load import as_transform_spec, as_uncertainty_spec, find_turn_mode, load
from verl_credit.credit.plugins.types import (
    AlgorithmContext,
    AlgorithmOutput,
    TransformContext,
    TransformOutput,
    TransformSpec,
    UncertaintyContext,
    UncertaintySpec,
)

__all__ = [
    "AlgorithmContext", "AlgorithmOutput", "TransformContext", "TransformOutput", "TransformSpec",
    "UncertaintyContext", "UncertaintySpec", "as_transform_spec", "as_uncertainty_spec", "find_turn_mode", "load",
    "TurnInputs", "run_algorithm", "run_transform", "run_uncertainty",
]  # fmt: skip
