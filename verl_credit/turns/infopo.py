"""InfoPO's turn reward: how much an observation changes the policy's next response. No gold answer is read.

    I_k = 1/|a_k+1| sum_t [log pi(a_k+1,t | x, o_k, a_k+1,<t) - log pi(a_k+1,t | x, placeholder, a_k+1,<t)]

x: all tokens up to the end of turn k's own; o_k: the tool messages after it; a_k+1: the tokens that the policy wrote next.
The first term is the ``old_log_probs`` of the row, the second is scored as information gain is, with a branch or a row for
each turn. I_k is the log ratio of a single sample and may be negative. Source: arXiv 2603.00656.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, nan

import torch

from verl_credit.errors import IntegrityError
from verl_credit.turns.answer import PseudoAnswer
from verl_credit.turns.batch import TurnBatch
from verl_credit.turns.requests import Request, turn_spans

PLACEHOLDER = "No information found."
"""The text that replaces the content of every tool message of the turn; the markup around it stays."""
FIELD = "masked_observations"


def masked_requests(turns: TurnBatch) -> list[Request]:
    """Returns a request per tool turn of every valid row: the next response after the placeholders. ``column``: turn + 1."""
    requests = []
    for row in turns.row_valid_B.nonzero().flatten().tolist():
        prompt, response = turns.prompt_ids[row], turns.response_ids[row]
        spans = turn_spans(turns.turn_ids_B_T[row].tolist())
        masked_K = _masked_observations(turns.records[row], row, len(spans) - 1)
        for turn, masked in enumerate(masked_K):
            first, end = spans[turn + 1]
            answer = PseudoAnswer((*masked, *response[first:end]), len(masked), len(masked) + end - first)
            requests.append(Request(row, turn + 1, 0, len(prompt) + spans[turn][1], answer))
    return requests


def _masked_observations(record: dict, row: int, n_tool_turns: int) -> list[list[int]]:
    masked = record.get(FIELD) or []
    if len(masked) < n_tool_turns:
        raise IntegrityError(
            f"turn signal 'infopo': row {row} has {n_tool_turns} tool turns, and its record's {FIELD} has {len(masked)} "
            "entries: for each, the token ids of its tool messages with a placeholder. The agent loops search_agent and "
            "turn_agent write them; one of your own has to"
        )
    return masked[: max(n_tool_turns, 0)]


def infopo_rewards(
    turns: TurnBatch,
    requests: Sequence[Request],
    masked_N: torch.Tensor,
    log_prob_B: Sequence[torch.Tensor],
) -> list[list[float]]:
    """I_k of every row's tool turns; NaN (missing) where a log-prob is not finite.

    ``masked_N``: the mean log-prob of each request (`masked_requests`). ``log_prob_B``: the row's response under the real
    context, position for position.
    """
    rewards: list[list[float]] = [[] for _ in turns.records]
    spans = {row: turn_spans(turns.turn_ids_B_T[row].tolist()) for row in {each.row for each in requests}}
    for request, masked in zip(requests, masked_N.tolist(), strict=True):
        first, end = spans[request.row][request.column]
        value = log_prob_B[request.row][first:end].double().mean().item() - masked
        rewards[request.row].append(value if isfinite(value) else nan)
    return rewards
