"""The credit of one step's rollouts, as the trainer computes it, from a `PackedPolicy` in this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerFast

from verl_credit.config.settings import CreditSettings
from verl_credit.packed.forward import PackedForward
from verl_credit.packed.policy import PackedPolicy
from verl_credit.turns.batch import TurnBatch
from verl_credit.turns.gains import plan_gains
from verl_credit.turns.signals import Signal, signals_of
from verl_credit.turns.step_credit import TurnStep, advantages_of
from verl_credit.turns.step_tables import turn_step
from verl_credit.turns.token_stage import TokenInputs, TokenStage
from verl_credit.twin.update import UpdateBatch


@dataclass(frozen=True)
class Credit:
    """What a run keeps from step to step: the signals' judges and SEPA's state are in here."""

    settings: CreditSettings
    tokenizer: PreTrainedTokenizerFast
    planned_steps: int
    stage: TokenStage
    signals: Mapping[Signal, float]

    @classmethod
    def of(cls, settings: CreditSettings, tokenizer: PreTrainedTokenizerFast, planned_steps: int) -> Credit:
        stage = TokenStage(settings.algorithm, tokenizer)
        return cls(settings, tokenizer, planned_steps, stage, signals_of(settings))

    def batch(
        self,
        policy: PackedPolicy,
        turns: TurnBatch,
        outcome_B: torch.Tensor,
        group_B: torch.Tensor,
        step: int,
    ) -> tuple[UpdateBatch, TurnStep, dict[str, float]]:
        """(rows for `update`, the step's credit, metrics of gains and tokens). ``step`` counts from 1."""
        prompts, responses = (
            [torch.tensor(ids) for ids in rows] for rows in (turns.prompt_ids, turns.response_ids)
        )
        mask_B_T = turns.response_mask_B_T.bool()
        with torch.no_grad():
            log_prob_B_T, entropy_B_T = policy.responses(
                prompts, responses, mask_B_T, entropy=self.stage.active
            )
        metrics: dict[str, float] = {}
        found = self._turn_step(policy, turns, log_prob_B_T, step, metrics)
        if self.stage.active:
            found.tokens = TokenInputs(
                step=step,
                mask_B_T=mask_B_T,
                token_ids_B_T=torch.nn.utils.rnn.pad_sequence(responses, batch_first=True),
                log_prob_B_T=log_prob_B_T,
                entropy_B_T=entropy_B_T,
                row_valid_B=turns.row_valid_B,
            )
        advantage_B_T = advantages_of(found, outcome_B, group_B, mask_B_T)
        rows = UpdateBatch(
            prompts,
            responses,
            turns.turn_ids_B_T,
            mask_B_T,
            log_prob_B_T,
            advantage_B_T.float(),
            found.clip_scale_B_T.float(),
        )
        return rows, found, metrics | found.token_metrics

    def _turn_step(self, policy, turns, log_prob_B_T, step, metrics) -> TurnStep:
        scored = self.settings.scores_at(step)
        plan = plan_gains(turns, self.settings, self.tokenizer, scored=scored)
        forward = PackedForward(policy, turns, log_prob_B_T)
        if plan.scored:
            plan = plan.scorer.before_forward(plan, forward)
        return turn_step(
            plan,
            forward,
            self.settings,
            self.tokenizer,
            metrics,
            signals=self.signals,
            step=step,
            planned_steps=self.planned_steps,
            stage=self.stage,
            tolerated_share=0.0,
            note=_never,
        )


def _never(text: str) -> None:
    """Called for lost turn rewards alone, none of which the lab's signals lose."""
    raise RuntimeError(text)
