"""The probe inside training: how many prompts fit its share of a step, and the prediction from sums over groups of prompts.

Update t moves the policy from θ_t to θ_{t+1}. The next step's rollouts are drawn from θ_{t+1}, on other prompts: a sample E
that the update has not seen. Both numbers are taken there:

    δH₁ = ∇H(θ_{t+1}) · (θ_{t+1} - θ_t)        ΔH = H(θ_{t+1}) - H(θ_t)

The gradient is taken at the new point, because E is drawn from it. To first order that is the prediction from the old one;
the second-order term has the other sign.
"""

from __future__ import annotations

import torch


def prompts_within(
    share: float, groups: int, available: int, step_s: float | None, prompt_s: float | None
) -> int:
    """How many prompts to measure: a multiple of ``groups``, at most ``available``, at least one a group.

    With s seconds of the step without the probe and p seconds a prompt, n p / (s + n p) <= share. ``prompt_s`` is None
    before the first measurement, which takes one prompt a group. 0 where ``available`` is less than ``groups``.
    """
    whole = available // groups * groups
    if prompt_s is None or step_s is None:
        return min(groups, whole)
    if share == 1:
        return whole
    fit = int(share / (1 - share) * step_s / prompt_s)
    return min(whole, max(groups, fit // groups * groups))


def group_prompts(prompt_B: torch.Tensor, prompts: list[int], groups: int) -> list[list[int]]:
    """The rows of each group; prompt number i of ``prompts`` is in group i mod ``groups``. ``prompt_B``: int64 [B]."""
    group_of = {prompt: place % groups for place, prompt in enumerate(prompts)}
    rows: list[list[int]] = [[] for _ in range(groups)]
    for row, prompt in enumerate(prompt_B.tolist()):
        if prompt in group_of:
            rows[group_of[prompt]].append(row)
    return rows


def deal(rows_G: list[list[int]], ranks: int, micro: int) -> list[tuple[int, int, bool]]:
    """(row, group, counts) in an order that can be cut into ``ranks`` equal parts, one a rank.

    Every rank has equally many rows of every group, and whole micro-batches of ``micro`` rows: each group's first row is
    repeated, without counting, until they divide.
    """
    parts = []
    for group, rows in enumerate(rows_G):
        repeated = [(rows[0], group, False)] * (-len(rows) % (ranks * micro))
        parts.append([(row, group, True) for row in rows] + repeated)
    return [entry for rank in range(ranks) for part in parts for entry in part[rank::ranks]]


def predicted_change(along_G: torch.Tensor, tokens_G: torch.Tensor) -> tuple[float, float]:
    """(δH₁, standard error), nats per token. ``along_G``: each group's sum over prompts of the surrogate's derivative along
    the update; ``tokens_G``: its sum over prompts of the mean number of tokens of a rollout. Both float64 [G], G >= 2.

        δH₁ = Σ along / Σ tokens        SE² = G / (G - 1) Σ (along - δH₁ tokens)² / (Σ tokens)²

    For groups of equal tokens the error is that of a mean of G numbers.
    """
    groups, tokens = len(along_G), tokens_G.sum()
    value = along_G.sum() / tokens
    rest_G = along_G - value * tokens_G
    return float(value), float((groups / (groups - 1) * rest_G.square().sum()).sqrt() / tokens)
