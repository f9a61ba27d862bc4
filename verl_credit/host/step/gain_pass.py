"""From a batch of trajectories to one information gain per tool turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from verl_credit.config.settings import CreditSettings
from verl_credit.credit import info_gain
from verl_credit.errors import IntegrityError
from verl_credit.turns.batch import TurnBatch
from verl_credit.turns.branches import BranchPlan, plan_branches
from verl_credit.turns.requests import Request, gain_requests, score_table


@dataclass(frozen=True)
class GainPlan:
    """What is to be scored, made before ``old_log_probs`` are computed. Nothing, where the step scores no gains."""

    turns: TurnBatch
    settings: CreditSettings
    scored: bool
    requests: list[Request]
    branches: BranchPlan
    """One per distinct context and answer."""

    @property
    def n_scored(self) -> int:
        """Contexts and answers that are scored: different ones, but with ``server`` every trajectory asks for its own."""
        if self.settings.algorithm.info_gain_scorer == "server":
            return len(self.requests)
        return len(set(self.branches.place_N) - {None})


def plan_gains(turns: TurnBatch, settings: CreditSettings, tokenizer, *, scored: bool = True) -> GainPlan:
    """``scored`` False: a step of plain GRPO (`info_gain_every`, `info_gain_warmup_steps`)."""
    scored = scored and settings.scores_gain
    requests = gain_requests(turns, settings, tokenizer) if scored else []
    return GainPlan(turns, settings, scored, requests, plan_branches(requests, turns))


def fit_branches(plan: GainPlan, budget: int | None) -> GainPlan:
    """The plan whose rows, answers included, fit ``budget`` tokens (None: any number does).

    What does not fit is a failed score: the run stops here with the key, or with ``info_gain_on_error=zero`` goes on.
    """
    if budget is None:
        return plan
    length_B = [len(p) + len(r) for p, r in zip(plan.turns.prompt_ids, plan.turns.response_ids, strict=True)]
    needed = max(n + more for n, more in zip(length_B, plan.branches.tokens_B, strict=True))
    if needed <= budget:
        return plan
    if plan.settings.algorithm.info_gain_on_error == "raise":
        raise IntegrityError(
            f"actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu={budget} cannot hold a row and its answers: {needed} "
            "tokens. algorithm.info_gain_on_error=zero counts gains that do not fit as 0 instead"
        )
    return replace(plan, branches=plan.branches.fitted(length_B, budget))


def score_gains(
    plan: GainPlan, score: Callable[[GainPlan], torch.Tensor], metrics: dict
) -> tuple[torch.Tensor, torch.Tensor]:
    """(info_gain_B_K, turn_mask_B_K). A step that scores nothing has no turn with a gain.

    ``score``: the mean log-prob of the gold tokens of every request of the plan.
    Failed scores (not finite) stop the run, or with ``info_gain_on_error=zero`` count as a gain of 0;
    ``credit/gain/failed_rows`` says how many rows they hit.
    """
    turns, settings = plan.turns, plan.settings
    rows = len(turns.records)
    width = max(int(turns.n_turns_B.max()) - 1, 0)
    metrics["credit/gain/scored"] = float(plan.scored)
    if not plan.scored:
        return torch.zeros(rows, width), torch.zeros(rows, width, dtype=torch.bool)
    scores = score(plan) if plan.requests else torch.zeros(0)
    score_B_K1, asked_B_K1 = score_table(
        plan.requests, scores, rows, width + 1, settings.algorithm.info_gain_aliases
    )
    gain = info_gain(
        score_B_K1,
        asked_B_K1,
        info_gain_type=settings.algorithm.info_gain_type,
        first_turn=settings.algorithm.info_gain_first_turn,
    )
    metrics["credit/gain/failed_rows"] = gain.failed_rows
    metrics["credit/gain/contexts"] = len(plan.requests)
    metrics["credit/gain/contexts_scored"] = plan.n_scored
    prior_N = score_B_K1[asked_B_K1[:, 0] & score_B_K1[:, 0].isfinite(), 0]
    if len(prior_N):
        metrics["credit/gain/prior"] = prior_N.exp().mean().item()
    if gain.failed_gains and settings.algorithm.info_gain_on_error == "raise":
        reasons = [record["score_error"] for record in turns.records if record.get("score_error")]
        raise IntegrityError(
            f"{gain.failed_gains} information gains in {gain.failed_rows} rows could not be scored "
            f"({reasons[0] if reasons else 'log-probs that are not finite'}). algorithm.info_gain_on_error=zero counts them "
            "as 0 instead"
        )
    return gain.info_gain_B_K, gain.turn_mask_B_K | gain.failed_B_K
