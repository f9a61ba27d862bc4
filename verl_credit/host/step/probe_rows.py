"""The rows of a step that the entropy probe measures: how many prompts, in which groups, on which rank, and as tensors."""

from __future__ import annotations

import torch
from verl.utils import tensordict_utils as tu

from verl_credit.credit.entropy_gradient import Surrogate
from verl_credit.host.engine.log_prob_engine import nested
from verl_credit.host.step import store
from verl_credit.names import PROBE_GROUP, PROBE_PATH, PROBE_SCORE


def prompts_within(
    share: float, groups: int, available: int, step_s: float | None, prompt_s: float | None
) -> int:
    """Returns how many prompts to measure: a multiple of ``groups``, at most ``available``, at least one a group.

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
    """Returns the rows of each group. Prompt number i of ``prompts`` is in group i mod ``groups``."""
    group_of = {prompt: place % groups for place, prompt in enumerate(prompts)}
    rows: list[list[int]] = [[] for _ in range(groups)]
    for row, prompt in enumerate(prompt_B.tolist()):
        if prompt in group_of:
            rows[group_of[prompt]].append(row)
    return rows


def deal(rows_G: list[list[int]], ranks: int, micro: int) -> list[tuple[int, int, bool]]:
    """Returns (row, group, counts) in an order that can be cut into ``ranks`` equal parts, one a rank.

    Every rank has equally many rows of every group, and whole micro-batches of ``micro`` rows: each group's first row is
    repeated, without counting, until they divide.
    """
    parts = []
    for group, rows in enumerate(rows_G):
        repeated = [(rows[0], group, False)] * (-len(rows) % (ranks * micro))
        parts.append([(row, group, True) for row in rows] + repeated)
    return [entry for rank in range(ranks) for part in parts for entry in part[rank::ranks]]


def rows_for_actors(batch, places: list[int], weights: Surrogate, dealt: list[tuple[int, int, bool]]):
    """Returns the dealt rows with their weights, as `host.actor.entropy_probe.measure` takes them."""
    rows = list(dict.fromkeys(row for row, _, _ in dealt))
    fields = ("prompts", "responses", "input_ids", "position_ids", "response_mask", "loss_mask")
    data = store.read(batch, *fields, rows=[places[row] for row in rows])
    at = {row: n for n, row in enumerate(rows)}
    data = tu.index_select_tensor_dict(data, [at[row] for row, _, _ in dealt])
    lengths = data["responses"].offsets().diff().tolist()
    for name, weight_B_T in ((PROBE_SCORE, weights.score_B_T), (PROBE_PATH, weights.path_B_T)):
        cut = [weight_B_T[row, :n] * counts for (row, _, counts), n in zip(dealt, lengths, strict=True)]
        data[name] = nested(cut)
    data[PROBE_GROUP] = torch.tensor([group for _, group, _ in dealt])
    return data


def padded_to(values: torch.Tensor, order: list[int], like_B_T: torch.Tensor) -> torch.Tensor:
    """The rows ``order`` of a nested tensor, float64, as wide as ``like_B_T``."""
    rows, padded_B_T = values.unbind(), torch.zeros(like_B_T.shape, dtype=torch.float64)
    for n, at in enumerate(order):
        padded_B_T[n, : len(rows[at])] = rows[at].double()
    return padded_B_T
