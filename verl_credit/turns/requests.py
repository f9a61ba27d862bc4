"""The scores that a batch needs: contexts and the pseudo-answers after them, for any scorer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from verl_credit.config.settings import CreditSettings
from verl_credit.turns.answer import AnswerWriter, PseudoAnswer
from verl_credit.turns.batch import TurnBatch
from verl_credit.turns.reward.qa import gold_answers, stated_form


@dataclass(frozen=True)
class Request:
    """A context and its answer: the first ``base`` tokens of a row's prompt and response, then ``answer``."""

    row: int
    column: int
    """0: the bare prompt; k: after tool turn k."""
    alias: int
    base: int
    answer: PseudoAnswer


def gain_requests(turns: TurnBatch, settings: CreditSettings, tokenizer) -> list[Request]:
    """Every valid row's bare prompt and the context after each of its tool turns, once per scored gold alias."""
    planner = RowPlanner(tokenizer, settings)
    requests = []
    for row in turns.row_valid_B.nonzero().flatten().tolist():
        requests += planner.requests(
            row,
            turns.prompt_ids[row],
            turns.response_ids[row],
            turns.turn_ids_B_T[row].tolist(),
            turns.ground_truths[row],
        )
    return requests


def writer_of(tokenizer, settings: CreditSettings) -> AnswerWriter:
    """The answer writer for these settings."""
    return AnswerWriter(
        tokenizer,
        settings.algorithm.info_gain_template,
        prefix=settings.algorithm.info_gain_prefix,
        header=settings.algorithm.info_gain_context == "call",
        chat_template_kwargs=settings.chat_template_kwargs,
    )


def aliases_that_count(truth, aliases: str) -> list[str]:
    """The gold answers of a row that ``info_gain_aliases`` scores: the first, or every different one."""
    golds = gold_answers(truth)
    return golds[:1] if aliases == "first" else list(dict.fromkeys(golds))


class RowPlanner:
    """The requests of single rows; repeated answers are tokenised once."""

    def __init__(self, tokenizer, settings: CreditSettings):
        self.settings = settings
        self.writer = writer_of(tokenizer, settings)
        self._write = lru_cache(maxsize=4096)(self.writer.write)
        self._template_of = lru_cache(maxsize=4096)(self.writer.template_of)

    def requests(
        self, row: int, prompt: Sequence[int], response: Sequence[int], turn_ids: Sequence[int], truth
    ) -> list[Request]:
        golds = aliases_that_count(truth, self.settings.algorithm.info_gain_aliases)
        ids, template = [*prompt, *response], self._template_of(tuple(prompt), stated_form(truth))
        requests = []
        for column, end in enumerate([0, *context_ends(turn_ids, self.settings.algorithm.info_gain_context)]):
            base = len(prompt) + end
            tail = self.writer.tail(ids[:base])
            written = self.writer.prefix_at(ids[:base], column > 0) + template
            for alias, gold in enumerate(golds):
                dropped, answer = self._write(tail, gold, written, column > 0)
                requests.append(Request(row, column, alias, base - dropped, answer))
        return requests


def context_ends(turn_ids: Sequence[int], where: str) -> list[int]:
    """Exclusive end, in response tokens, of the context after each tool turn (all turns but the last).

    ``observation``: up to the first token of the next turn, including the observation and the assistant header.
    ``call``: up to the end of the turn's own tokens, before its observation (the released convention, which never
    measures the last retrieved result).
    """
    spans = turn_spans(turn_ids)
    if where == "observation":
        return [first for first, _ in spans[1:]]
    return [end for _, end in spans[:-1]]


def turn_spans(turn_ids: Sequence[int]) -> list[tuple[int, int]]:
    """[first, end) of each turn's own tokens, in response tokens."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, turn in enumerate(turn_ids):
        if turn >= 0:
            first.setdefault(turn, position)
            last[turn] = position
    return [(first[turn], last[turn] + 1) for turn in range(len(first))]


def score_table(
    requests: Sequence[Request], score_N: torch.Tensor, rows: int, columns: int, aliases: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(score_B_K1, requested_B_K1): mean log-probs of the gold tokens, float64, combined over aliases.

        first   the first alias
        max     the best one
        mean    log of the mean over aliases of exp(score)

    One score that is not finite makes its context's score NaN.
    """
    score_B_K1 = torch.zeros(rows, columns, dtype=torch.float64)
    requested_B_K1 = torch.zeros(rows, columns, dtype=torch.bool)
    if not requests:
        return score_B_K1, requested_B_K1
    n_alias = 1 + max(request.alias for request in requests)
    all_B_K1_A = torch.full((rows, columns, n_alias), -torch.inf, dtype=torch.float64)
    known_B_K1_A = torch.zeros(rows, columns, n_alias, dtype=torch.bool)
    row_N, column_N, alias_N = torch.tensor([(r.row, r.column, r.alias) for r in requests]).T
    all_B_K1_A[row_N, column_N, alias_N] = score_N.double()
    known_B_K1_A[row_N, column_N, alias_N] = True
    requested_B_K1 = known_B_K1_A.any(dim=2)
    failed_B_K1 = (known_B_K1_A & ~all_B_K1_A.isfinite()).any(dim=2)
    if aliases == "mean":
        joined_B_K1 = all_B_K1_A.logsumexp(dim=2) - known_B_K1_A.sum(dim=2).clamp(min=1).log()
    else:
        joined_B_K1 = all_B_K1_A.amax(dim=2)
    score_B_K1 = torch.where(requested_B_K1, joined_B_K1, 0.0)
    return torch.where(failed_B_K1, torch.nan, score_B_K1), requested_B_K1
