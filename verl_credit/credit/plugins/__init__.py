"""A user's own operators, named by dotted path in the configuration."""

from verl_credit.credit.plugins.algorithm import TurnInputs, run_algorithm
from verl_credit.credit.plugins.load import load
from verl_credit.credit.plugins.transform import as_transform_spec, run_transform
from verl_credit.credit.plugins.turn_mode import find_turn_mode
from verl_credit.credit.plugins.types import (
    AlgorithmContext,
    AlgorithmOutput,
    TransformContext,
    TransformOutput,
    TransformSpec,
    UncertaintyContext,
    UncertaintySpec,
)
from verl_credit.credit.plugins.uncertainty import as_uncertainty_spec, run_uncertainty

__all__ = [
    "AlgorithmContext", "AlgorithmOutput", "TransformContext", "TransformOutput", "TransformSpec",
    "UncertaintyContext", "UncertaintySpec", "as_transform_spec", "as_uncertainty_spec", "find_turn_mode", "load",
    "TurnInputs", "run_algorithm", "run_transform", "run_uncertainty",
]  # fmt: skip
