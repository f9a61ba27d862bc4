"""LAPO: what the gold answer loses under the whole trajectory when a turn is taken out of it.

    g_k = log p(gold | trajectory) - log p(gold | trajectory with turn k and its observation := "[DELETE]")

log p: mean over the gold answer's tokens before the answer turn. What the next turn wrote follows the text. Later turns are
read anew, so that nothing of turn k is left in their states. Source: arXiv 2607.13501 (its abstract; no released code).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import isfinite, nan

from verl_credit.config.settings import CreditSettings
from verl_credit.lazy import torch
from verl_credit.turns.book import TurnBatch
from verl_credit.turns.requests import PseudoAnswer, Request, RowPlanner, score_table, turn_spans
from verl_credit.turns.scorers import Forward, GainPlan

DELETED = "[DELETE]"


def deleted_requests(turns: TurnBatch, settings: CreditSettings, tokenizer) -> list[Request]:
    """Requests for every valid row with tool turns. ``column``: k + 1 without turn k; the whole trajectory's is the last."""
    planner, column = RowPlanner(tokenizer, settings), int(turns.n_turns_B.max())
    text = tokenizer(DELETED, add_special_tokens=False)["input_ids"]
    requests = []
    for row in turns.valid_rows:
        prompt, response = turns.prompt_ids[row], turns.response_ids[row]
        ids, truth = turns.turn_ids_B_T[row, : len(response)].tolist(), turns.ground_truths[row]
        spans = turn_spans(ids)
        if not (last := len(spans) - 1) > 0:
            continue
        whole = planner.requests(row, prompt, response, ids, truth)
        requests += [replace(request, column=column) for request in whole if request.column == last]
        for turn, ((first, _), (after, _)) in enumerate(pairwise(spans)):
            left = [*response[:first], *text, *response[after:]]
            left_ids = [*ids[:first], *[turn] * len(text), *ids[after:]]
            without = planner.requests(row, prompt, left, left_ids, truth)
            start, sequence = len(prompt) + first, [*prompt, *left]
            requests += [
                _from(request, start, sequence, turn) for request in without if request.column == last
            ]
    return requests


def _from(request: Request, start: int, sequence: list[int], turn: int) -> Request:
    """The request with what follows the row's own tokens, which end at ``start``, as a part of its answer."""
    base, answer = min(start, request.base), request.answer
    before = sequence[base : request.base]
    gold = (len(before) + place for place in (answer.gold_start, answer.gold_end))
    return Request(
        request.row, turn + 1, request.alias, base, PseudoAnswer((*before, *answer.token_ids), *gold)
    )


def score_lapo(plan: GainPlan, forward: Forward) -> list[list[float]] | None:
    """g_k of every row's tool turns, NaN (missing) where a score is not finite; None in a step without lapo."""
    if not plan.scored or not plan.settings.deletes_turns:
        return None
    part, columns = plan.deleted, int(plan.turns.n_turns_B.max()) + 1
    scores_N = part.scorer.score(part, forward) if part.requests else torch.zeros(0)
    aliases = plan.settings.algorithm.info_gain_aliases
    score_B_K1, asked_B_K1 = score_table(part.requests, scores_N, len(plan.turns.records), columns, aliases)
    loss_B_K, n_B = score_B_K1[:, -1:] - score_B_K1[:, 1:-1], asked_B_K1[:, 1:-1].sum(dim=1)
    rows = zip(loss_B_K.tolist(), n_B.tolist(), strict=True)
    return [[value if isfinite(value) else nan for value in row[:n]] for row, n in rows]
