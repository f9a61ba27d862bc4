"""From a batch of trajectories to one information gain per tool turn."""

from __future__ import annotations

from collections.abc import Callable

import torch

from verl_credit.credit import info_gain
from verl_credit.host.answer_template import PseudoAnswer, assistant_header, pseudo_answer
from verl_credit.host.checks import IntegrityError
from verl_credit.host.gain_rows import ScoreRow, context_ends, score_rows
from verl_credit.host.reward import gold_answers
from verl_credit.host.settings import CreditSettings
from verl_credit.host.turn_batch import TurnBatch


def score_gains(
    turns: TurnBatch,
    settings: CreditSettings,
    tokenizer,
    compute_log_prob: Callable,
    *,
    dp_size: int,
    metrics: dict,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(info_gain_B_K, turn_mask_B_K). Mode ``none`` scores nothing: no turn has a gain.

    Scored answer: the first gold alias. Failed scores (not finite) stop the run, or with
    ``info_gain_on_error=zero`` count as a gain of 0; ``credit/gain/failed_rows`` says how many.
    """
    rows = len(turns.records)
    width = max(int(turns.n_turns_B.max()) - 1, 0)
    if not settings.scores_gain:
        return torch.zeros(rows, width), torch.zeros(rows, width, dtype=torch.bool)
    places, score_list = _contexts(turns, settings, tokenizer)
    score_B_K1 = torch.zeros(rows, width + 1, dtype=torch.float64)
    asked_B_K1 = torch.zeros(rows, width + 1, dtype=torch.bool)
    if score_list:
        row, column = torch.tensor(places).T
        score_B_K1[row, column] = score_rows(compute_log_prob, score_list, dp_size=dp_size)
        asked_B_K1[row, column] = True
    gain = info_gain(
        score_B_K1,
        asked_B_K1,
        info_gain_type=settings.info_gain_type,
        first_turn=settings.info_gain_first_turn,
    )
    metrics["credit/gain/failed_rows"] = gain.failed_rows
    metrics["credit/gain/contexts"] = len(score_list)
    metrics["credit/gain/contexts_scored"] = len(set(score_list))
    prior_N = score_B_K1[asked_B_K1[:, 0] & score_B_K1[:, 0].isfinite(), 0]
    if len(prior_N):
        metrics["credit/gain/prior"] = prior_N.exp().mean().item()
    if gain.failed_gains and settings.info_gain_on_error == "raise":
        raise IntegrityError(
            f"{gain.failed_gains} information gains in {gain.failed_rows} rows could not be scored "
            "(log-probs that are not finite). algorithm.info_gain_on_error=zero counts them as 0 instead"
        )
    return gain.info_gain_B_K, gain.turn_mask_B_K | gain.failed_B_K


def _contexts(turns: TurnBatch, settings: CreditSettings, tokenizer):
    """([(row, column)], [ScoreRow]): the bare prompt and the context after each tool turn of every valid row."""
    header = assistant_header(tokenizer) if settings.info_gain_context == "call" else []
    answers: dict[str, PseudoAnswer] = {}
    places, score_list = [], []
    for row in range(len(turns.records)):
        if not turns.row_valid_B[row]:
            continue
        gold = gold_answers(turns.ground_truths[row])[0]
        if gold not in answers:
            answers[gold] = pseudo_answer(tokenizer, gold, settings.info_gain_template)
        prompt, response = turns.prompt_ids[row], turns.response_ids[row]
        ends = context_ends(turns.turn_ids_B_T[row].tolist(), settings.info_gain_context)
        contexts = [prompt] + [prompt + response[:end] + header for end in ends]
        for column, context in enumerate(contexts):
            places.append((row, column))
            score_list.append(ScoreRow(tuple(context), answers[gold]))
    return places, score_list
