"""Information gain by branches: pseudo-answers are scored in the ``old_log_probs`` forward of their rows.

A branch is an answer after the first ``base`` tokens of a row (prompt and response). Its tokens attend to those tokens and
to itself alone (`policy/attention`), its positions continue from the base, and all other parts of a transformer act per
token. So its log-probs equal those of a separate row, and cost only the answer's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verl_credit.lazy import torch
from verl_credit.turns.rollout.book import TurnBatch
from verl_credit.turns.score.requests import Request


@dataclass(frozen=True)
class Branch:
    """``token_ids`` after the first ``base`` tokens of a row; the gold tokens are ``[gold_start, gold_end)``."""

    base: int
    token_ids: tuple[int, ...]
    gold_start: int
    gold_end: int


@dataclass(frozen=True)
class BranchPlan:
    """The branches of each row with descending bases, and the branch of each request."""

    branches_B: list[list[Branch]]
    place_N: list[tuple[int, int] | None]
    """(row, number of its branch), or None if it was dropped. Requests with the same context and answer share a branch."""

    @property
    def tokens_B(self) -> list[int]:
        return [sum(len(branch.token_ids) for branch in row) for row in self.branches_B]

    def fitted(self, length_B: Sequence[int], budget: int) -> BranchPlan:
        """The plan without branches that would make a row of ``length_B`` tokens longer than ``budget``.

        The shortest contexts are kept, the bare prompt before all others, because the group's other rows share its score.
        """
        dropped_B: list[int] = []  # a row's first branches have the largest bases
        for row, length in zip(self.branches_B, length_B, strict=True):
            first, left = len(row), budget - length
            while first > 0 and len(row[first - 1].token_ids) <= left:
                first -= 1
                left -= len(row[first].token_ids)
            dropped_B.append(first)
        moved_N = [place and (place[0], place[1] - dropped_B[place[0]]) for place in self.place_N]
        kept_B = [row[first:] for row, first in zip(self.branches_B, dropped_B, strict=True)]
        return BranchPlan(kept_B, [place if place and place[1] >= 0 else None for place in moved_N])

    def field(self) -> torch.Tensor:
        """A nested tensor with one int64 row per trajectory, for `decode_branches`."""
        return torch.nested.as_nested_tensor(
            [encode_branches([(b.base, b.token_ids) for b in row]) for row in self.branches_B],
            layout=torch.jagged,
        )

    def scores(self, log_prob_B: Sequence[torch.Tensor]) -> torch.Tensor:
        """Mean log-prob of the gold tokens of every request, float64 [N].

        ``log_prob_B``: per row, the engine's log-probs at its branch tokens; position j has the one of token j + 1. A branch
        that was dropped gives NaN, a failed score.
        """
        value_B: list[list[torch.Tensor]] = []
        for row, log_prob in zip(self.branches_B, log_prob_B, strict=True):
            at, values, log_prob = 0, [], log_prob.double()
            for branch in row:
                gold = log_prob[at + branch.gold_start - 1 : at + branch.gold_end - 1]
                values.append(gold.mean())
                at += len(branch.token_ids)
            if row and at != len(log_prob):
                raise RuntimeError(f"{len(log_prob)} log-probs came back for {at} branch tokens")
            value_B.append(values)
        missing = torch.tensor(float("nan"), dtype=torch.float64)
        return torch.stack(
            [missing if place is None else value_B[place[0]][place[1]] for place in self.place_N]
        )


def plan_branches(requests: Sequence[Request], turns: TurnBatch) -> BranchPlan:
    """Plans a branch per distinct context and answer; the bare prompt of a group is scored only in its first row."""
    branches = [_branch(request, turns) for request in requests]
    place_of: dict[tuple, tuple[int, int]] = {}
    branches_B: list[list[Branch]] = [[] for _ in turns.prompt_ids]
    place_N: list[tuple[int, int] | None] = [None] * len(requests)
    for number in sorted(range(len(requests)), key=lambda number: -branches[number].base):
        request = requests[number]
        row, bare = request.row, request.column == 0
        context = tuple(turns.prompt_ids[row][: request.base]) if bare else (row, request.base)
        key = (bare, context, request.answer)
        if key not in place_of:
            place_of[key] = (row, len(branches_B[row]))
            branches_B[row].append(branches[number])
        place_N[number] = place_of[key]
    return BranchPlan(branches_B, place_N)


def _branch(request: Request, turns: TurnBatch) -> Branch:
    """The request's branch up to its last gold token. If it starts with gold, the row's token before it is added, which
    predicts the first gold token."""
    answer, base = request.answer, request.base
    ids, start, end = answer.token_ids[: answer.gold_end], answer.gold_start, answer.gold_end
    if start == 0:
        prompt, response = turns.prompt_ids[request.row], turns.response_ids[request.row]
        base -= 1
        before = prompt[base] if base < len(prompt) else response[base - len(prompt)]
        ids, start, end = (before, *ids), 1, end + 1
    return Branch(base, ids, start, end)


def encode_branches(branches: Sequence[tuple[int, Sequence[int]]]) -> torch.Tensor:
    """[n, base_1, length_1, ..., base_n, length_n, tokens of 1, ..., tokens of n]; never empty."""
    shape = [number for base, ids in branches for number in (base, len(ids))]
    return torch.tensor([len(branches), *shape, *(i for _, ids in branches for i in ids)], dtype=torch.long)


def decode_branches(encoded: torch.Tensor) -> tuple[list[tuple[int, int]], torch.Tensor]:
    """([(base, length)], all tokens, one branch after the other)."""
    n = int(encoded[0])
    shape = encoded[1 : 1 + 2 * n].view(n, 2).tolist()
    return [(base, length) for base, length in shape], encoded[1 + 2 * n :]
