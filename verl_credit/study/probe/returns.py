"""Sums over what is still to come in a rollout."""

from __future__ import annotations

import torch


def returns_to_go(value_B_T: torch.Tensor, written_B_T: torch.Tensor) -> torch.Tensor:
    """G_j = Σ_{k >= j} value_k over the policy's tokens, 0 elsewhere. [B, T] float64.

    Example: entropies (1, .5, .25) give (1.75, .75, .25).
    """
    kept_B_T = torch.where(written_B_T, value_B_T.double(), 0.0)
    return torch.where(written_B_T, kept_B_T.flip(1).cumsum(1).flip(1), 0.0)


def places(written_B_T: torch.Tensor) -> torch.Tensor:
    """The number of each token among the policy's own tokens of its row: 0, 1, ...; observations do not count. [B, T]"""
    return (written_B_T.long().cumsum(1) - 1).clamp_min(0)


def mean_by_prompt(value_B: torch.Tensor, prompt_B: torch.Tensor, prompts: int) -> torch.Tensor:
    """Mean over each prompt's rollouts, [prompts] float64; ``prompt_B`` counts from 0. ValueError if one has none."""
    rows_G = torch.bincount(prompt_B, minlength=prompts)
    if (rows_G == 0).any():
        raise ValueError(f"prompt {int((rows_G == 0).nonzero()[0])} has no rollout: every group needs one")
    summed_G = torch.zeros(prompts, dtype=torch.float64).index_add(0, prompt_B, value_B.double())
    return summed_G / rows_G


def prompt_numbers(group_B: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Groups renumbered 0, 1, ... in the order of their first row, and how many there are."""
    number = {group: i for i, group in enumerate(dict.fromkeys(group_B.tolist()))}
    return torch.tensor([number[group] for group in group_B.tolist()]), len(number)
