"""Runs a user's operators of tokens on a batch: an uncertainty, a transform, an algorithm."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from verl_credit.credit.checks import as_bool, output_dtype
from verl_credit.credit.plugins.lists import as_lists, groups_of, run_by_rows, turn_lists
from verl_credit.credit.plugins.load import adopted, made
from verl_credit.credit.plugins.types import (
    AlgorithmContext,
    TransformContext,
    TransformOutput,
    TransformSpec,
    UncertaintyContext,
    UncertaintySpec,
)
from verl_credit.credit.token.gtpo import gtpo_weights
from verl_credit.credit.token.hicra import hicra


def as_uncertainty_spec(operator: Any, name: str) -> UncertaintySpec:
    """A spec, a factory of one, or a function ``f(context) -> list``."""
    operator = adopted(made(operator), UncertaintySpec)
    spec = operator if isinstance(operator, UncertaintySpec) else UncertaintySpec(name, operator)
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


def as_transform_spec(operator: Any, name: str) -> TransformSpec:
    """A spec, a factory of one, or a function of a context (its needs are attributes of the function)."""
    operator = adopted(made(operator), TransformSpec)
    if isinstance(operator, TransformSpec):
        return operator
    if not callable(operator):
        raise ValueError(
            f"algorithm.transform_mode={name!r} gave a {type(operator).__name__}; expected a TransformSpec"
        )
    return TransformSpec(
        name=name,
        needs_planning=bool(getattr(operator, "needs_planning", False)),
        uses_sepa_controller=bool(getattr(operator, "uses_sepa_controller", False)),
        uses_turn_advantages=bool(getattr(operator, "uses_turn_advantages", False)),
        compute_context=operator,
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
    params: dict | None = None,
    **settings,
) -> tuple[torch.Tensor, dict[str, float]]:
    """(advantage_B_T, metrics averaged over groups); one call per prompt. ``settings``: fields of `TransformContext`."""
    shared = TransformContext([], [], [], params=dict(params or {}), **settings)
    mask_B_T = as_bool("mask_B_T", mask_B_T)
    dtype = output_dtype(turn_advantage_B_T, uncertainty_B_T)
    turn_advantage_B_T = torch.where(mask_B_T, turn_advantage_B_T.to(dtype), 0.0)
    advantage_B_T = torch.zeros_like(turn_advantage_B_T)
    if spec.compute_context is None:
        advantage_B_T = _by_parts(spec, shared, turn_advantage_B_T, mask_B_T, uncertainty_B_T, planning_B_T)

    def computed(rows: list[int]) -> Any:
        context = replace(
            shared,
            params=dict(shared.params),
            episode_advantages=outcome_advantage_B[rows].tolist(),
            logprobs_G=as_lists(log_prob_B_T, mask_B_T, rows),
            planning_masks_G=as_lists(planning_B_T, mask_B_T, rows),
            uncertainties_G=as_lists(uncertainty_B_T, mask_B_T, rows),
            turn_advantages_G=as_lists(turn_advantage_B_T, mask_B_T, rows),
        )
        return spec.compute_context(context)

    def post_processed(rows: list[int]) -> TransformOutput:
        raw = as_lists(uncertainty_B_T, mask_B_T, rows)
        lists, extra = spec.post_process(as_lists(advantage_B_T, mask_B_T, rows), raw, dict(shared.params))
        return TransformOutput(lists, extra_metrics=extra)

    metrics: dict[str, float] = {}
    if spec.compute_context is not None or spec.post_process is not None:
        call = post_processed if spec.compute_context is None else computed
        groups = groups_of(group_B, row_valid_B)
        metrics = run_by_rows(call, groups, advantage_B_T, mask_B_T, f"transform {spec.name!r}")
    return torch.where(row_valid_B[:, None], advantage_B_T, 0.0), metrics


def _by_parts(
    spec: TransformSpec,
    shared: TransformContext,
    turn_advantage_B_T: torch.Tensor,
    mask_B_T: torch.Tensor,
    uncertainty_B_T: torch.Tensor,
    planning_B_T: torch.Tensor | None,
) -> torch.Tensor:
    if spec.entropy_transform is not None:
        uncertainty_B_T = uncertainty_B_T.clone()

        def changed(rows: list[int]) -> list:
            values, plans = (as_lists(x_B_T, mask_B_T, rows)[0] for x_B_T in (uncertainty_B_T, planning_B_T))
            return [spec.entropy_transform(values, plans, shared.sepa_lambda)]

        rows_with_tokens = mask_B_T.any(dim=1).nonzero().tolist()
        name = f"entropy_transform of {spec.name!r}"
        run_by_rows(changed, rows_with_tokens, uncertainty_B_T, mask_B_T, name)
    advantage_B_T = turn_advantage_B_T
    if spec.use_gtpo:
        advantage_B_T = advantage_B_T * gtpo_weights(uncertainty_B_T, mask_B_T, beta=shared.gtpo_beta)
    if spec.apply_hicra:
        if planning_B_T is None:
            raise ValueError(
                f"transform {spec.name!r} applies HICRA, which needs a planning mask: set needs_planning"
            )
        advantage_B_T = hicra(advantage_B_T, planning_B_T, shared.hicra_alpha)
    return advantage_B_T


@dataclass(frozen=True)
class TurnInputs:
    """The turns that an algorithm may read. Ids are -1 on tokens that the policy did not write."""

    turn_ids_B_T: torch.Tensor
    turn_reward_B_K: torch.Tensor
    turn_mask_B_K: torch.Tensor
    anchor_B_K1: torch.Tensor | None = None
    """Number of the state before each turn, -1: none."""
    observations_B: list[list[str]] | None = None

    def lists(self, mask_B_T: torch.Tensor, rows: list[int]) -> dict[str, list[list]]:
        rewards_G = turn_lists(self.turn_reward_B_K, self.turn_mask_B_K, self.turn_ids_B_T, rows)
        lists = {"turn_ids_G": as_lists(self.turn_ids_B_T, mask_B_T, rows), "turn_rewards_G": rewards_G}
        if self.anchor_B_K1 is not None:
            ids_G = [
                self.anchor_B_K1[row, : len(turns) + 1].tolist()
                for row, turns in zip(rows, rewards_G, strict=True)
            ]
            lists["anchors_G"] = [[None if one < 0 else one for one in ids] for ids in ids_G]
        if self.observations_B is not None:
            lists["observations_G"] = [self.observations_B[row] for row in rows]
        return lists


def run_algorithm(
    algorithm: Callable[[AlgorithmContext], Any],
    outcome_B: torch.Tensor,
    log_prob_B_T: torch.Tensor,
    mask_B_T: torch.Tensor,
    group_B: torch.Tensor,
    row_valid_B: torch.Tensor,
    *,
    name: str,
    planning_B_T: torch.Tensor | None = None,
    entropy_B_T: torch.Tensor | None = None,
    params: dict | None = None,
    turns: TurnInputs | None = None,
    **settings,
) -> tuple[torch.Tensor, dict[str, float]]:
    """(advantage_B_T, metrics averaged over groups); one call per prompt. ``settings``: fields of `AlgorithmContext`."""
    dtype = output_dtype(outcome_B, log_prob_B_T)
    advantage_B_T = torch.zeros(mask_B_T.shape, dtype=dtype, device=mask_B_T.device)
    mask_B_T = as_bool("mask_B_T", mask_B_T)

    def call(rows: list[int]) -> Any:
        context = AlgorithmContext(
            rewards_G=outcome_B[rows].tolist(),
            logprobs_G=as_lists(log_prob_B_T, mask_B_T, rows),
            planning_masks_G=as_lists(planning_B_T, mask_B_T, rows),
            params=dict(params or {}),
            precomputed_entropies_G=None if entropy_B_T is None else as_lists(entropy_B_T, mask_B_T, rows),
            **settings,
            **({} if turns is None else turns.lists(mask_B_T, rows)),
        )
        return algorithm(context)

    groups = groups_of(group_B, row_valid_B)
    return advantage_B_T, run_by_rows(call, groups, advantage_B_T, mask_B_T, f"algorithm {name!r}")
