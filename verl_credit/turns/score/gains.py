"""Information gain of each tool turn, from a batch of trajectories and the policy's forward."""

from __future__ import annotations

from math import nan
from typing import NamedTuple

from verl_credit.config.settings import CreditSettings
from verl_credit.credit import info_gain
from verl_credit.errors import IntegrityError
from verl_credit.lazy import torch
from verl_credit.turns.rollout.book import TurnBatch
from verl_credit.turns.rollout.sessions import joined
from verl_credit.turns.score.branches import plan_branches
from verl_credit.turns.score.requests import gain_requests, score_table
from verl_credit.turns.score.scorers import SCORERS, Forward, GainPlan


class Gains(NamedTuple):
    info_gain_B_K: torch.Tensor
    turn_mask_B_K: torch.Tensor
    answer_B: torch.Tensor
    """Probability of the gold answer after the row's last scored context; NaN where the policy's was not scored."""
    gold_B_K1: torch.Tensor
    """The gold answer's probability before every turn."""


def plan_gains(
    turns: TurnBatch,
    settings: CreditSettings,
    tokenizer,
    *,
    scored: bool = True,
    rollouts: TurnBatch | None = None,
) -> GainPlan:
    """``scored`` False: a step of plain GRPO (`info_gain_every`, `info_gain_warmup_steps`). ``rollouts``: `joined`."""
    scored = scored and settings.scores_gain
    requests = gain_requests(turns, settings, tokenizer) if scored else []
    scorer = SCORERS[settings.algorithm.info_gain_scorer]
    branches = plan_branches(requests, turns)
    return GainPlan(turns, settings, scorer, scored, requests, branches, rollouts or joined(turns))


def score_gains(plan: GainPlan, forward: Forward, metrics: dict) -> Gains:
    """The gains of a step. A step that scores nothing has no turn with a gain.

    Failed scores (not finite) stop the run; with ``info_gain_on_error=drop`` the gain is NaN, a missing one to every turn
    mode (up to ``faults.max_lost_rewards``); with ``zero`` it is 0. ``credit/gain/failed_rows`` counts the rows with one.
    """
    metrics["credit/gain/scored"] = float(plan.scored)
    if not plan.scored:
        rows, width = len(plan.rollouts.records), _columns(plan.rollouts) - 1
        no_B_K = torch.zeros(rows, width)
        no_gold_B_K1 = torch.full((rows, width + 1), nan)
        return Gains(no_B_K, no_B_K.bool(), no_gold_B_K1[:, 0], no_gold_B_K1)
    return gains_of(plan, *score_answers(plan, forward), metrics)


def score_answers(plan: GainPlan, forward: Forward) -> tuple[torch.Tensor, torch.Tensor]:
    """(score_B_K1, requested_B_K1): mean log-probs of the gold answer's tokens before every turn (`score_table`) of every
    rollout. The context of a turn is the prompt of its own output and what follows."""
    scores = plan.scorer.score(plan, forward) if plan.requests else torch.zeros(0)
    aliases = plan.settings.algorithm.info_gain_aliases
    found = score_table(plan.requests, scores, len(plan.turns.records), _columns(plan.turns), aliases)
    sessions = plan.rollouts.sessions
    return found if sessions is None else (sessions.join_turns(found[0]), sessions.join_turns(found[1]))


def gains_of(plan: GainPlan, score_B_K1: torch.Tensor, requested_B_K1: torch.Tensor, metrics: dict) -> Gains:
    """`score_gains` for known scores."""
    settings = plan.settings
    gain = info_gain(
        score_B_K1,
        requested_B_K1,
        info_gain_type=settings.algorithm.info_gain_type,
        first_turn=settings.algorithm.info_gain_first_turn,
    )
    metrics["credit/gain/failed_rows"] = gain.failed_rows
    metrics["credit/gain/contexts"] = len(plan.requests)
    metrics["credit/gain/contexts_scored"] = plan.scorer.n_scored(plan)
    prior_N = score_B_K1[requested_B_K1[:, 0] & score_B_K1[:, 0].isfinite(), 0]
    if len(prior_N):
        metrics["credit/gain/prior"] = prior_N.exp().mean().item()
    on_error = settings.algorithm.info_gain_on_error
    if gain.failed_gains and on_error == "raise":
        raise IntegrityError(
            f"{gain.failed_gains} information gains in {gain.failed_rows} rows could not be scored (log-probs that are not "
            "finite). algorithm.info_gain_on_error=drop goes on without them"
        )
    gain_B_K = gain.info_gain_B_K if on_error == "drop" else gain.info_gain_B_K.nan_to_num(0.0)
    gold_B_K1 = score_B_K1.exp().masked_fill(~requested_B_K1, nan)
    last_B = requested_B_K1.shape[1] - 1 - requested_B_K1.flip(1).int().argmax(dim=1)
    answer_B = gold_B_K1.gather(1, last_B[:, None])[:, 0]
    if plan.scorer.frozen:  # it says nothing about the policy's collapse
        answer_B = torch.full_like(answer_B, nan)
    return Gains(gain_B_K, gain.turn_mask_B_K, answer_B, gold_B_K1)


def _columns(turns: TurnBatch) -> int:
    """Most turns of a row."""
    return max(int(turns.n_turns_B.max()), 1)
