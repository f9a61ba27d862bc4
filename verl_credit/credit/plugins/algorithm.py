"""A user's own algorithm in place of the whole pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from verl_credit.credit.checks import as_bool, output_dtype
from verl_credit.credit.plugins.lists import as_lists, groups_of, run_by_rows, turn_lists
from verl_credit.credit.plugins.types import AlgorithmContext


@dataclass(frozen=True)
class TurnInputs:
    """What an algorithm may know of turns. Ids are -1 on tokens that the policy did not write."""

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
    step: int = 0,
    sepa_lambda: float = 0.0,
    gtpo_beta: float = 0.1,
    hicra_alpha: float = 0.2,
    turns: TurnInputs | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """(advantage_B_T, metrics averaged over groups); one call per prompt."""
    advantage_B_T = torch.zeros(
        mask_B_T.shape, dtype=output_dtype(outcome_B, log_prob_B_T), device=mask_B_T.device
    )
    mask_B_T = as_bool("mask_B_T", mask_B_T)

    def call(rows: list[int]) -> Any:
        return algorithm(
            AlgorithmContext(
                rewards_G=outcome_B[rows].tolist(),
                logprobs_G=as_lists(log_prob_B_T, mask_B_T, rows),
                planning_masks_G=as_lists(planning_B_T, mask_B_T, rows),
                params=dict(params or {}),
                step=step,
                sepa_lambda=sepa_lambda,
                gtpo_beta=gtpo_beta,
                hicra_alpha=hicra_alpha,
                precomputed_entropies_G=None
                if entropy_B_T is None
                else as_lists(entropy_B_T, mask_B_T, rows),
                **({} if turns is None else turns.lists(mask_B_T, rows)),
            )
        )

    groups = groups_of(group_B, row_valid_B)
    return advantage_B_T, run_by_rows(call, groups, advantage_B_T, mask_B_T, f"algorithm {name!r}")
