"""Information gain by branches: answers are appended to their rows in the old_log_probs forward (`turns/branches.py`)."""

from __future__ import annotations

from dataclasses import replace

import torch

from verl_credit.config.fit import SHORT_ANSWER, turns_at_most
from verl_credit.config.resolved import Config, select
from verl_credit.config.settings import ATTENTION, CreditSettings
from verl_credit.errors import ConfigError, IntegrityError
from verl_credit.policy.attention.implementation import NAMES
from verl_credit.turns.scorers.scorer import Forward, GainPlan, Scorer

SCORER = "algorithm.info_gain_scorer"
BYPASS = "algorithm.rollout_correction.bypass_mode"


class BranchScorer(Scorer):
    name = "branch"
    rides = True

    def needs(self, config: Config) -> None:
        rows = "or algorithm.info_gain_scorer=rows"
        if select(config, ATTENTION) not in NAMES:
            use = f"only {', '.join(NAMES)} let an answer see its own context alone; set {ATTENTION}=auto, {rows}"
            raise ConfigError.of(config, ATTENTION, SCORER, accepted=use)
        if select(config, BYPASS):
            use = f"answers ride on the old_log_probs forward, which is then not made; set bypass_mode=false, {rows}"
            raise ConfigError.of(config, BYPASS, SCORER, accepted=use)

    def answers_behind_row(self, config: Config) -> int:
        return turns_at_most(config)[1] or 1  # of no limit: the bare prompt's

    def before_forward(self, plan: GainPlan, forward: Forward) -> GainPlan:
        plan = fit_branches(plan, forward.budget)
        forward.carry(plan.branches.field())
        return plan

    def score(self, plan: GainPlan, forward: Forward) -> torch.Tensor:
        return plan.branches.scores(forward.carried())

    def cost(self, plan: GainPlan, around_s: float, forward_s: float) -> dict[str, float]:
        """The seconds hold the branches' share, by tokens, of the forward's seconds: an estimate."""
        branch = sum(plan.branches.tokens_B)
        rows = sum(map(len, plan.turns.prompt_ids)) + sum(map(len, plan.turns.response_ids))
        share = branch / max(1, branch + rows)
        return {
            "credit/gain/seconds": around_s + share * forward_s,
            "credit/gain/branch_token_share": share,
        }

    def says(self, config: Config, settings: CreditSettings) -> str:
        contexts = turns_at_most(config)[1]
        if contexts is None:
            return (
                "no forward of its own: an answer per context and alias rides behind its row of old_log_probs "
                f"(attention: {settings.attention})"
            )
        length = config.data.max_prompt_length + config.data.max_response_length
        return (
            f"no forward of its own: up to {contexts} answers per alias ride behind each row of old_log_probs; with "
            f"{SHORT_ANSWER} tokens each they are {contexts * SHORT_ANSWER / length:.1%} of the tokens of a full row "
            f"(attention: {settings.attention})"
        )


def fit_branches(plan: GainPlan, budget: int | None) -> GainPlan:
    """The plan whose rows, answers included, fit ``budget`` tokens (None: any number does).

    An answer that does not fit is a failed score: the run stops here and names the key, or with
    ``info_gain_on_error=zero`` goes on.
    """
    if budget is None:
        return plan
    length_B = [len(p) + len(r) for p, r in zip(plan.turns.prompt_ids, plan.turns.response_ids, strict=True)]
    needed = max(n + more for n, more in zip(length_B, plan.branches.tokens_B, strict=True))
    if needed <= budget:
        return plan
    if plan.settings.algorithm.info_gain_on_error == "raise":
        masked = len(plan.requests) > plan.n_gains
        what = "what is scored behind it" if masked else "its answers"
        other = "drop leaves out turns" if masked else "zero counts gains"
        raise IntegrityError(
            f"actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu={budget} cannot hold a row and {what}: {needed} "
            f"tokens. algorithm.info_gain_on_error={other} that do not fit{'' if masked else ' as 0'} instead"
        )
    return replace(plan, branches=plan.branches.fitted(length_B, budget))
