"""Runs a user's operators on a batch: of outcomes, an uncertainty, a transform, an algorithm. They read plain lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

from verl_credit.credit.arguments import as_group_ids, output_dtype
from verl_credit.credit.groups import valid_rows
from verl_credit.credit.plugins.load import on_lists
from verl_credit.credit.plugins.types import (
    AlgorithmContext,
    TransformContext,
    TransformOutput,
    TransformSpec,
    UncertaintyContext,
    UncertaintySpec,
)
from verl_credit.credit.token.gtpo import gtpo_weights, hicra
from verl_credit.lazy import torch


def groups_of(group_B: torch.Tensor, row_valid_B: torch.Tensor) -> Iterable[list[int]]:
    """Valid rows of each group, in the order of the groups' first rows."""
    rows: dict[int, list[int]] = {}
    for row, (group, valid) in enumerate(zip(group_B.tolist(), row_valid_B.tolist(), strict=True)):
        if valid:
            rows.setdefault(group, []).append(row)
    return rows.values()


def as_lists(values_B_T: torch.Tensor | None, mask_B_T: torch.Tensor, rows: list[int]) -> list[list]:
    """The policy's own tokens of the given rows, masks as 0 and 1; empty lists without values."""
    if values_B_T is None:
        return [[] for _ in rows]
    values_B_T = values_B_T.int() if values_B_T.dtype == torch.bool else values_B_T
    return [values_B_T[row][mask_B_T[row]].tolist() for row in rows]


def turn_lists(
    reward_B_K: torch.Tensor, mask_B_K: torch.Tensor, turn_ids_B_T: torch.Tensor, rows: list[int]
) -> list[list[float | None]]:
    """A reward or None per tool turn of the given rows; the ids are -1 on tokens that the policy did not write."""
    known_B_K = mask_B_K & reward_B_K.isfinite()
    lists = []
    for row in rows:
        n_tool_turns = max([0, *turn_ids_B_T[row].tolist()])
        pairs = zip(reward_B_K[row].tolist(), known_B_K[row].tolist(), strict=True)
        rewards_K = [reward if known else None for reward, known in pairs]
        lists.append((rewards_K + [None] * n_tool_turns)[:n_tool_turns])
    return lists


def run_by_rows(
    call: Callable[[list[int]], Any],
    groups: Iterable[list[int]],
    out_B_T: torch.Tensor,
    mask_B_T: torch.Tensor,
    name: str,
) -> dict[str, float]:
    """Calls an operator once for each group of rows and writes its lists to their policy tokens.

    The operator returns a list per row, or an object with ``token_advs`` and perhaps ``extra_metrics``. Returns the mean of
    each metric over the groups that report it.
    """
    metrics: dict[str, list[float]] = {}
    for rows in groups:
        output = call(rows)
        lists = getattr(output, "token_advs", output)
        lists = lists.tolist() if isinstance(lists, torch.Tensor) else lists
        if not isinstance(lists, list | tuple) or len(lists) != len(rows):
            got = f"{len(lists)} lists" if isinstance(lists, list | tuple) else type(lists).__name__
            raise ValueError(
                f"{name} returned {got} for a group of {len(rows)} completions; expected one list each"
            )
        for row, values in zip(rows, lists, strict=True):
            n, largest = int(mask_B_T[row].sum()), torch.finfo(out_B_T.dtype).max
            values_t = _numbers(values, n, name, f"the policy tokens of row {row}", largest)
            out_B_T[row, mask_B_T[row]] = values_t.to(out_B_T)
        for metric, value in getattr(output, "extra_metrics", {}).items():
            metrics.setdefault(metric, []).append(value)
    return {metric: sum(values) / len(values) for metric, values in sorted(metrics.items())}


def _numbers(values: Any, n: int, name: str, where: str, largest: float) -> torch.Tensor:
    """An operator's result as a tensor. Raises ValueError for anything but a list of ``n`` finite numbers."""
    try:
        values_n = values.tolist() if isinstance(values, torch.Tensor) else list(values)
        if isinstance(values, Mapping | Set) or any(isinstance(value, str) for value in values_n):
            raise TypeError  # keys, members without an order, and digits would pass for the numbers
        values_t = torch.tensor([float(value) for value in values_n], dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        got = repr(values)
    else:
        bad_t = ~(values_t.abs() <= largest)
        if len(values_t) == n and not bad_t.any():
            return values_t
        got = f"{len(values_t)} values" if len(values_t) != n else str(float(values_t[bad_t][0]))
    raise ValueError(f"{name} returned {got} for {where}; expected a list of {n} finite numbers")


def outcome_operator(
    function: Callable[..., Any], name: str, params: dict | None = None
) -> Callable[..., torch.Tensor]:
    """``operator(outcome_B, group_B, row_valid_B=None) -> advantage_B`` from a function of plain lists.

    Accepted: f(rewards), f(rewards, params), f(rewards, *, params), and a factory without arguments that returns one
    of them. ``rewards`` are the outcomes of one prompt's valid rows in row order; the function returns as many finite
    numbers. It is also called for groups of one.
    """
    call = on_lists(function, name, dict(params or {}))

    def operator(
        outcome_B: torch.Tensor, group_B: torch.Tensor, *, row_valid_B: torch.Tensor | None = None
    ) -> torch.Tensor:
        valid_B = valid_rows(outcome_B, group_B, row_valid_B)
        advantage_B = torch.zeros(outcome_B.shape, dtype=torch.float64)
        for rows in groups_of(as_group_ids("group_B", group_B), valid_B):
            rewards = outcome_B[rows].tolist()
            where, largest = f"rewards {rewards}", torch.finfo(torch.float32).max
            advantage_B[rows] = _numbers(call(rewards), len(rows), f"advantage_mode={name!r}", where, largest)
        return advantage_B.to(device=outcome_B.device, dtype=output_dtype(outcome_B))

    return operator


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
    shared = TransformContext([], [], [], **settings)
    dtype = output_dtype(turn_advantage_B_T, uncertainty_B_T)
    turn_advantage_B_T = torch.where(mask_B_T, turn_advantage_B_T.to(dtype), 0.0)
    advantage_B_T, whole, after = (
        torch.zeros_like(turn_advantage_B_T),
        spec.compute_context,
        spec.post_process,
    )
    if whole is None:
        advantage_B_T = _by_parts(spec, shared, turn_advantage_B_T, mask_B_T, uncertainty_B_T, planning_B_T)

    def call(rows: list[int]) -> Any:
        own_params, uncertainties_G = dict(params or {}), as_lists(uncertainty_B_T, mask_B_T, rows)
        if whole is None:
            given = as_lists(advantage_B_T, mask_B_T, rows)
            lists, extra = (given, {}) if after is None else after(given, uncertainties_G, own_params)
            return TransformOutput(lists, extra_metrics=extra)
        context = replace(
            shared,
            params=own_params,
            episode_advantages=outcome_advantage_B[rows].tolist(),
            logprobs_G=as_lists(log_prob_B_T, mask_B_T, rows),
            planning_masks_G=as_lists(planning_B_T, mask_B_T, rows),
            uncertainties_G=uncertainties_G,
            turn_advantages_G=as_lists(turn_advantage_B_T, mask_B_T, rows),
        )
        return whole(context)

    metrics = run_by_rows(
        call, groups_of(group_B, row_valid_B), advantage_B_T, mask_B_T, f"transform {spec.name!r}"
    )
    return torch.where(row_valid_B[:, None], advantage_B_T, 0.0), metrics


def _by_parts(
    spec: TransformSpec,
    shared: TransformContext,
    advantage_B_T: torch.Tensor,
    mask_B_T: torch.Tensor,
    uncertainty_B_T: torch.Tensor,
    planning_B_T: torch.Tensor | None,
) -> torch.Tensor:
    if (change := spec.entropy_transform) is not None:
        raw_B_T, uncertainty_B_T = uncertainty_B_T, uncertainty_B_T.clone()

        def changed(rows: list[int]) -> list:
            values, plans = (as_lists(x_B_T, mask_B_T, rows)[0] for x_B_T in (raw_B_T, planning_B_T))
            return [change(values, plans, shared.sepa_lambda)]

        rows_with_tokens = mask_B_T.any(dim=1).nonzero().tolist()
        name = f"entropy_transform of {spec.name!r}"
        run_by_rows(changed, rows_with_tokens, uncertainty_B_T, mask_B_T, name)
    if spec.use_gtpo:
        advantage_B_T = advantage_B_T * gtpo_weights(uncertainty_B_T, mask_B_T, beta=shared.gtpo_beta)
    if not spec.apply_hicra:
        return advantage_B_T
    if planning_B_T is None:
        raise ValueError(f"transform {spec.name!r}: HICRA needs a planning mask: set needs_planning")
    return hicra(advantage_B_T, planning_B_T, shared.hicra_alpha)


@dataclass(frozen=True)
class TurnInputs:
    """The turns that an algorithm may read. Ids are -1 on tokens that the policy did not write."""

    turn_ids_B_T: torch.Tensor
    turn_reward_B_K: torch.Tensor
    turn_mask_B_K: torch.Tensor
    anchor_B_K1: torch.Tensor | None = None
    """Number of the state before each turn, -1: none."""
    observations_B: list[list[str]] | None = None

    def lists(self, mask_B_T: torch.Tensor, rows: list[int]) -> dict[str, Any]:
        rewards_G = turn_lists(self.turn_reward_B_K, self.turn_mask_B_K, self.turn_ids_B_T, rows)
        lists = {"turn_ids_G": as_lists(self.turn_ids_B_T, mask_B_T, rows), "turn_rewards_G": rewards_G}
        if self.anchor_B_K1 is not None:
            lists["anchors_G"] = [
                [None if state < 0 else state for state in self.anchor_B_K1[row, : len(turns) + 1].tolist()]
                for row, turns in zip(rows, rewards_G, strict=True)
            ]
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
