"""A user's own uncertainty."""

from __future__ import annotations

from typing import Any

import torch

from verl_credit.credit.checks import as_bool, output_dtype
from verl_credit.credit.plugins.lists import as_lists, run_by_rows
from verl_credit.credit.plugins.load import adopted, made
from verl_credit.credit.plugins.types import UncertaintyContext, UncertaintySpec


def as_uncertainty_spec(found: Any, name: str) -> UncertaintySpec:
    """A spec, a factory of one, or a function ``f(context) -> list``."""
    found = adopted(made(found), UncertaintySpec)
    spec = found if isinstance(found, UncertaintySpec) else UncertaintySpec(name, found)
    if not callable(spec.compute):
        raise ValueError(f"algorithm.uncertainty_kind={name!r}: compute is not callable")
    if spec.needs_distributions:
        raise ValueError(
            f"algorithm.uncertainty_kind={name!r} needs whole token distributions, which are not kept; "
            "precomputed_entropy holds their entropies"
        )
    return spec


def run_uncertainty(
    spec: UncertaintySpec,
    log_prob_B_T: torch.Tensor,
    mask_B_T: torch.Tensor,
    *,
    entropy_B_T: torch.Tensor | None = None,
    planning_B_T: torch.Tensor | None = None,
    params: dict | None = None,
) -> torch.Tensor:
    """uncertainty_B_T, 0 outside the mask; one call per row that has policy tokens."""
    out_B_T = torch.zeros(mask_B_T.shape, dtype=output_dtype(log_prob_B_T), device=mask_B_T.device)
    mask_B_T = as_bool("mask_B_T", mask_B_T)

    def call(rows: list[int]) -> list:
        context = UncertaintyContext(
            logprobs=as_lists(log_prob_B_T, mask_B_T, rows)[0],
            precomputed_entropy=None if entropy_B_T is None else as_lists(entropy_B_T, mask_B_T, rows)[0],
            planning_mask=None if planning_B_T is None else as_lists(planning_B_T, mask_B_T, rows)[0],
            params=dict(params or {}),
        )
        return [spec.compute(context)]

    run_by_rows(call, mask_B_T.any(dim=1).nonzero().tolist(), out_B_T, mask_B_T, f"uncertainty {spec.name!r}")
    return out_B_T
