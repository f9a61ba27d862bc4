"""The credit of one step's rollouts, as the trainer computes it, from a `PackedPolicy` in this process."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedTokenizerFast

from verl_credit.config.settings import CreditSettings
from verl_credit.policy.packed import PackedPolicy
from verl_credit.study.forward import PackedForward
from verl_credit.study.twin.update import UpdateBatch
from verl_credit.turns.assign import CreditRun, StepCredit, StepInputs, assign, step_inputs
from verl_credit.turns.batch import TurnBatch
from verl_credit.turns.gains import plan_gains
from verl_credit.turns.token_stage import TokenInputs


@dataclass(frozen=True)
class Credit:
    run: CreditRun
    planned_steps: int

    @classmethod
    def of(cls, settings: CreditSettings, tokenizer: PreTrainedTokenizerFast, planned_steps: int) -> Credit:
        return cls(CreditRun.of(settings, tokenizer), planned_steps)

    def batch(
        self,
        policy: PackedPolicy,
        turns: TurnBatch,
        outcome_B: torch.Tensor,
        group_B: torch.Tensor,
        step: int,
    ) -> tuple[UpdateBatch, StepCredit, dict[str, float]]:
        """(rows for `update`, the step's credit, metrics of gains and tokens). ``step`` counts from 1."""
        prompts, responses = (
            [torch.tensor(ids) for ids in rows] for rows in (turns.prompt_ids, turns.response_ids)
        )
        mask_B_T, tokenwise = turns.response_mask_B_T.bool(), self.run.stage.active
        with torch.no_grad():
            log_prob_B_T, entropy_B_T = policy.responses(prompts, responses, mask_B_T, entropy=tokenwise)
        metrics: dict[str, float] = {}
        inputs = self._inputs(PackedForward(policy, turns, log_prob_B_T), turns, step, metrics)
        if tokenwise:
            tokens = TokenInputs(
                step=step,
                mask_B_T=mask_B_T,
                token_ids_B_T=torch.nn.utils.rnn.pad_sequence(responses, batch_first=True),
                log_prob_B_T=log_prob_B_T,
                entropy_B_T=entropy_B_T,
                row_valid_B=turns.row_valid_B,
            )
            inputs = replace(inputs, tokens=tokens)
        found = assign(inputs, outcome_B, group_B, mask_B_T)
        rows = UpdateBatch(
            prompts,
            responses,
            turns.turn_ids_B_T,
            mask_B_T,
            log_prob_B_T,
            found.advantage_B_T.float(),
            found.clip_scale_B_T.float(),
        )
        return rows, found, metrics | found.metrics

    def _inputs(self, forward: PackedForward, turns: TurnBatch, step: int, metrics: dict) -> StepInputs:
        settings = self.run.settings
        plan = plan_gains(turns, settings, self.run.tokenizer, scored=settings.scores_at(step))
        if plan.scored:
            plan = plan.scorer.before_forward(plan, forward)
        return step_inputs(self.run, plan, forward, metrics, step=step, planned_steps=self.planned_steps)
