"""Information gain and infopo of each tool turn, from a batch of trajectories and the policy's forward.

InfoPO's turn reward is how much an observation changes the policy's next response. No gold answer is read.

    I_k = 1/|a_k+1| sum_t [log pi(a_k+1,t | x, o_k, a_k+1,<t) - log pi(a_k+1,t | x, placeholder, a_k+1,<t)]

x: all tokens up to the end of turn k's own; o_k: the tool messages after it; a_k+1: the tokens that the policy wrote next.
The first term is the ``old_log_probs`` of the row, the second is scored as information gain is, with a branch or a row for
each turn. I_k is the log ratio of a single sample and may be negative. Source: arXiv 2603.00656.
"""

from __future__ import annotations

from math import isfinite, nan
from typing import NamedTuple

from verl_credit.config.settings import CreditSettings
from verl_credit.credit import info_gain
from verl_credit.errors import IntegrityError
from verl_credit.lazy import torch
from verl_credit.turns.book import TurnBatch
from verl_credit.turns.branches import plan_branches
from verl_credit.turns.lapo import deleted_requests
from verl_credit.turns.requests import PseudoAnswer, Request, gain_requests, score_table, turn_spans
from verl_credit.turns.scorers import SCORERS, Forward, GainPlan

PLACEHOLDER = "No information found."
"""The text that replaces the content of every tool message of the turn; the markup around it stays."""


class Gains(NamedTuple):
    info_gain_B_K: torch.Tensor
    turn_mask_B_K: torch.Tensor
    answer_B: torch.Tensor
    """Probability of the gold answer after the row's last scored context; NaN where the policy's was not scored."""
    gold_B_K1: torch.Tensor
    """That before every turn."""


def plan_gains(turns: TurnBatch, settings: CreditSettings, tokenizer, *, scored: bool = True) -> GainPlan:
    """``scored`` False: a step of plain GRPO (`info_gain_every`, `info_gain_warmup_steps`)."""
    scored = scored and settings.uses_scorer
    gains = gain_requests(turns, settings, tokenizer) if scored and settings.scores_gain else []
    masked = masked_requests(turns) if scored and settings.masks_observations else []
    deleted = deleted_requests(turns, settings, tokenizer) if scored and settings.deletes_turns else []
    requests = gains + masked + deleted
    scorer, numbers = SCORERS[settings.algorithm.info_gain_scorer], (len(gains), len(masked))
    return GainPlan(turns, settings, scorer, scored, requests, plan_branches(requests, turns), *numbers)


def masked_requests(turns: TurnBatch) -> list[Request]:
    """Returns a request per tool turn of every valid row: the next response after the placeholders. ``column``: turn + 1."""
    requests = []
    for row in turns.valid_rows:
        prompt, response = turns.prompt_ids[row], turns.response_ids[row]
        spans = turn_spans(turns.turn_ids_B_T[row])
        masked_K, n_tool_turns = turns.records[row].get("masked_observations") or [], max(len(spans) - 1, 0)
        if len(masked_K) < n_tool_turns:
            raise IntegrityError(
                f"turn signal 'infopo': row {row} has {n_tool_turns} tool turns, and its record's masked_observations has "
                f"{len(masked_K)} entries: for each, the token ids of its tool messages with a placeholder. The agent loops "
                "search_agent and turn_agent write them; one of your own has to"
            )
        for turn, masked in enumerate(masked_K[:n_tool_turns]):
            first, end = spans[turn + 1]
            answer = PseudoAnswer((*masked, *response[first:end]), len(masked), len(masked) + end - first)
            requests.append(Request(row, turn + 1, 0, len(prompt) + spans[turn][1], answer))
    return requests


def score_infopo(plan: GainPlan, forward: Forward) -> list[list[float]] | None:
    """I_k of every row's tool turns, NaN (missing) where a log-prob is not finite; None in a step without infopo."""
    if not plan.scored or not plan.settings.masks_observations:
        return None
    plan, turns = plan.masked, plan.turns
    masked_N = plan.scorer.score(plan, forward) if plan.requests else torch.zeros(0)
    rewards: list[list[float]] = [[] for _ in turns.records]
    rows = {request.row for request in plan.requests}
    spans = {row: turn_spans(turns.turn_ids_B_T[row]) for row in rows}
    log_prob_B = forward.written()
    for request, masked in zip(plan.requests, masked_N.tolist(), strict=True):
        first, end = spans[request.row][request.column]
        value = log_prob_B[request.row][first:end].double().mean().item() - masked
        rewards[request.row].append(value if isfinite(value) else nan)
    return rewards


def score_gains(plan: GainPlan, forward: Forward, metrics: dict) -> Gains:
    """The gains of a step. A step that scores nothing has no turn with a gain.

    Failed scores (not finite) stop the run; with ``info_gain_on_error=drop`` the gain is NaN, a missing one to every turn
    mode (up to ``faults.max_lost_rewards``); with ``zero`` it is 0. ``credit/gain/failed_rows`` counts the rows with one.
    """
    scored = plan.scored and plan.settings.scores_gain
    metrics["credit/gain/scored"] = float(scored)
    if not scored:
        rows, width = len(plan.turns.records), _columns(plan) - 1
        no_B_K = torch.zeros(rows, width)
        no_gold_B_K1 = torch.full((rows, width + 1), nan)
        return Gains(no_B_K, no_B_K.bool(), no_gold_B_K1[:, 0], no_gold_B_K1)
    return gains_of(plan, *score_answers(plan, forward), metrics)


def score_answers(plan: GainPlan, forward: Forward) -> tuple[torch.Tensor, torch.Tensor]:
    """(score_B_K1, requested_B_K1): mean log-probs of the gold answer's tokens before every turn (`score_table`)."""
    gains = plan.gains
    scores = plan.scorer.score(gains, forward) if gains.requests else torch.zeros(0)
    aliases = plan.settings.algorithm.info_gain_aliases
    return score_table(gains.requests, scores, len(plan.turns.records), _columns(plan), aliases)


def gains_of(plan: GainPlan, score_B_K1: torch.Tensor, requested_B_K1: torch.Tensor, metrics: dict) -> Gains:
    """`score_gains` for known scores."""
    turns, settings = plan.turns, plan.settings
    gain = info_gain(
        score_B_K1,
        requested_B_K1,
        info_gain_type=settings.algorithm.info_gain_type,
        first_turn=settings.algorithm.info_gain_first_turn,
        gap_epsilon=settings.algorithm.info_gain_gap_epsilon,
    )
    metrics["credit/gain/failed_rows"] = gain.failed_rows
    metrics["credit/gain/contexts"] = len(plan.gains.requests)
    metrics["credit/gain/contexts_scored"] = plan.scorer.n_scored(plan.gains)
    prior_N = score_B_K1[requested_B_K1[:, 0] & score_B_K1[:, 0].isfinite(), 0]
    if len(prior_N):
        metrics["credit/gain/prior"] = prior_N.exp().mean().item()
    on_error = settings.algorithm.info_gain_on_error
    if gain.failed_gains and on_error == "raise":
        reasons = [record["score_error"] for record in turns.records if record.get("score_error")]
        raise IntegrityError(
            f"{gain.failed_gains} information gains in {gain.failed_rows} rows could not be scored "
            f"({reasons[0] if reasons else 'log-probs that are not finite'}). With algorithm.info_gain_on_error=drop the "
            "run goes on without them"
        )
    gain_B_K = gain.info_gain_B_K if on_error == "drop" else gain.info_gain_B_K.nan_to_num(0.0)
    gold_B_K1 = score_B_K1.exp().masked_fill(~requested_B_K1, nan)
    last_B = requested_B_K1.shape[1] - 1 - requested_B_K1.flip(1).int().argmax(dim=1)
    answer_B = gold_B_K1.gather(1, last_B[:, None])[:, 0]
    if plan.scorer.frozen:  # it says nothing about the policy's collapse
        answer_B = torch.full_like(answer_B, nan)
    return Gains(gain_B_K, gain.turn_mask_B_K, answer_B, gold_B_K1)


def _columns(plan: GainPlan) -> int:
    """Most turns of a row."""
    return max(int(plan.turns.n_turns_B.max()), 1)
