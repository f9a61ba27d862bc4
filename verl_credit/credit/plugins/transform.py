"""A user's own token transform: a function of a context, or a spec whose parts replace ours."""

from __future__ import annotations

from typing import Any

import torch

from verl_credit.credit.checks import as_bool, output_dtype
from verl_credit.credit.plugins.lists import as_lists, groups_of, run_by_rows
from verl_credit.credit.plugins.load import adopted, made
from verl_credit.credit.plugins.types import TransformContext, TransformOutput, TransformSpec
from verl_credit.credit.token.gtpo import gtpo_weights
from verl_credit.credit.token.hicra import hicra


def as_transform_spec(found: Any, name: str) -> TransformSpec:
    """A spec, a factory of one, or a function of a context (its needs are attributes of the function)."""
    found = adopted(made(found), TransformSpec)
    if isinstance(found, TransformSpec):
        return found
    if not callable(found):
        raise ValueError(
            f"algorithm.transform_mode={name!r} gave a {type(found).__name__}; expected a TransformSpec"
        )
    return TransformSpec(
        name=name,
        needs_planning=bool(getattr(found, "needs_planning", False)),
        uses_sepa_controller=bool(getattr(found, "uses_sepa_controller", False)),
        uses_turn_advantages=bool(getattr(found, "uses_turn_advantages", False)),
        compute_context=found,
    )


def run_transform(
    spec: TransformSpec,
    turn_advantage_B_T: torch.Tensor,
    outcome_advantage_B: torch.Tensor,
    mask_B_T: torch.Tensor,
    group_B: torch.Tensor,
    row_valid_B: torch.Tensor,
    *,
    log_prob_B_T: torch.Tensor,
    uncertainty_B_T: torch.Tensor,
    planning_B_T: torch.Tensor | None,
    uncertainty_kind: str = "surprisal",
    params: dict | None = None,
    step: int = 0,
    sepa_lambda: float = 0.0,
    gtpo_beta: float = 0.1,
    hicra_alpha: float = 0.2,
) -> tuple[torch.Tensor, dict[str, float]]:
    """(advantage_B_T, metrics averaged over groups); one call per prompt."""
    name, params = f"transform {spec.name!r}", dict(params or {})
    mask_B_T = as_bool("mask_B_T", mask_B_T)
    dtype = output_dtype(turn_advantage_B_T, uncertainty_B_T)
    turn_advantage_B_T = torch.where(mask_B_T, turn_advantage_B_T.to(dtype), 0.0)
    advantage_B_T = torch.zeros_like(turn_advantage_B_T)
    if spec.compute_context is None:
        advantage_B_T = _by_parts(
            spec,
            turn_advantage_B_T,
            mask_B_T,
            uncertainty_B_T,
            planning_B_T,
            sepa_lambda,
            gtpo_beta,
            hicra_alpha,
        )

    def computed(rows: list[int]) -> Any:
        return spec.compute_context(
            TransformContext(
                episode_advantages=outcome_advantage_B[rows].tolist(),
                logprobs_G=as_lists(log_prob_B_T, mask_B_T, rows),
                planning_masks_G=as_lists(planning_B_T, mask_B_T, rows),
                sepa_lambda=sepa_lambda,
                params=dict(params),
                step=step,
                gtpo_beta=gtpo_beta,
                hicra_alpha=hicra_alpha,
                uncertainties_G=as_lists(uncertainty_B_T, mask_B_T, rows),
                uncertainty_kind=uncertainty_kind,
                turn_advantages_G=as_lists(turn_advantage_B_T, mask_B_T, rows),
            )
        )

    def post_processed(rows: list[int]) -> TransformOutput:
        raw = as_lists(uncertainty_B_T, mask_B_T, rows)
        lists, extra = spec.post_process(as_lists(advantage_B_T, mask_B_T, rows), raw, dict(params))
        return TransformOutput(lists, extra_metrics=extra)

    metrics: dict[str, float] = {}
    if spec.compute_context is not None or spec.post_process is not None:
        call = post_processed if spec.compute_context is None else computed
        metrics = run_by_rows(call, groups_of(group_B, row_valid_B), advantage_B_T, mask_B_T, name)
    return torch.where(row_valid_B[:, None], advantage_B_T, 0.0), metrics


def _by_parts(
    spec: TransformSpec,
    turn_advantage_B_T: torch.Tensor,
    mask_B_T: torch.Tensor,
    uncertainty_B_T: torch.Tensor,
    planning_B_T: torch.Tensor | None,
    sepa_lambda: float,
    gtpo_beta: float,
    hicra_alpha: float,
) -> torch.Tensor:
    if spec.entropy_transform is not None:
        uncertainty_B_T = uncertainty_B_T.clone()

        def changed(rows: list[int]) -> list:
            values, plans = (
                as_lists(of_B_T, mask_B_T, rows)[0] for of_B_T in (uncertainty_B_T, planning_B_T)
            )
            return [spec.entropy_transform(values, plans, sepa_lambda)]

        rows_with_tokens = mask_B_T.any(dim=1).nonzero().tolist()
        run_by_rows(
            changed, rows_with_tokens, uncertainty_B_T, mask_B_T, f"entropy_transform of {spec.name!r}"
        )
    advantage_B_T = turn_advantage_B_T
    if spec.use_gtpo:
        advantage_B_T = advantage_B_T * gtpo_weights(uncertainty_B_T, mask_B_T, beta=gtpo_beta)
    if spec.apply_hicra:
        if planning_B_T is None:
            raise ValueError(
                f"transform {spec.name!r} applies HICRA, which needs a planning mask: set needs_planning"
            )
        advantage_B_T = hicra(advantage_B_T, planning_B_T, hicra_alpha)
    return advantage_B_T
