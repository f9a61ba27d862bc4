"""A step of the twin: the credit of its rollouts, as the trainer computes it, and the updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from verl_credit.credit import turn_policy_loss
from verl_credit.credit.loss import aggregate
from verl_credit.names import CLIP_SCALE
from verl_credit.policy.packed import PackedPolicy, groups_of
from verl_credit.study.forward import PackedForward, PackedRows
from verl_credit.turns.assign import CreditRun, StepCredit, StepInputs, assign
from verl_credit.turns.book import TurnBatch
from verl_credit.turns.scorers import ScoreRow
from verl_credit.turns.step import credited as give_credit
from verl_credit.turns.step import scored


@dataclass(frozen=True)
class Objective:
    """The keys of ``actor_rollout_ref.actor`` and its ``policy_loss`` that the loss reads, by their names."""

    clip_ratio_low: float
    clip_ratio_high: float
    clip_ratio_c: float
    ratio_level: str
    dynamic_clip: bool
    loss_agg_mode: str
    mini_batch_rows: int
    """ppo_mini_batch_size times rollout.n"""
    epochs: int = 1
    grad_clip: float = 1.0
    loss_scale_factor: float | None = None
    entropy_coeff: float = 0.0


@dataclass(frozen=True)
class UpdateBatch:
    """Rows in the order in which the update reads them; [B, T] right-padded over the responses."""

    prompt_ids: Sequence[torch.Tensor]
    response_ids: Sequence[torch.Tensor]
    turn_ids_B_T: torch.Tensor
    mask_B_T: torch.Tensor
    old_log_prob_B_T: torch.Tensor
    advantage_B_T: torch.Tensor
    clip_scale_B_T: torch.Tensor


def update(
    policy: PackedPolicy, optimizer: torch.optim.Optimizer, batch: UpdateBatch, objective: Objective
) -> list[dict[str, float]]:
    """Makes an optimiser step for each mini-batch; returns the metrics of each.

    The loss of a micro-batch is divided by the tokens and rows of its mini-batch, so gradients add up whatever the
    micro-batches are, as in verl's engine on one rank.
    """
    rows, size = len(batch.prompt_ids), objective.mini_batch_rows
    if rows % size:
        raise ValueError(f"{rows} rows do not divide into mini-batches of {size} rows")
    return [
        _one_update(policy, optimizer, batch, objective, list(range(start, start + size)))
        for _ in range(objective.epochs)
        for start in range(0, rows, size)
    ]


def _one_update(policy, optimizer, batch, objective, rows) -> dict[str, float]:
    optimizer.zero_grad(set_to_none=True)
    tokens = int(batch.mask_B_T[rows].sum())
    prompts, responses = ([each[row] for row in rows] for each in (batch.prompt_ids, batch.response_ids))
    total, clipped = 0.0, 0.0
    for members in policy.group_batches(groups_of(prompts, responses)):
        part = [rows[i] for one in members for i in one.rows]
        prompt_ids, ids = ([each[row] for row in part] for each in (batch.prompt_ids, batch.response_ids))
        mask_b_T, entropy = batch.mask_B_T[part, : max(map(len, ids))], bool(objective.entropy_coeff)
        log_prob_b_T, entropy_b_T = policy.responses(prompt_ids, ids, mask_b_T, entropy=entropy)
        loss, metrics = _loss(batch, objective, part, log_prob_b_T, entropy_b_T, tokens)
        loss.backward()
        total += loss.item()
        clipped += metrics["pg_clipfrac"].item() * int(batch.mask_B_T[part].sum()) / max(tokens, 1)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(parameters, objective.grad_clip)
    if norm.isfinite():  # verl skips the step otherwise
        optimizer.step()
    return {"loss": total, "grad_norm": norm.item(), "pg_clipfrac": clipped}


def _loss(batch, objective, part, log_prob_b_T, entropy_b_T, tokens):
    names = ("old_log_prob_B_T", "advantage_B_T", "mask_B_T", "turn_ids_B_T", "clip_scale_B_T")
    *tables, clip_scale_b_T = (getattr(batch, name)[part, : log_prob_b_T.shape[1]] for name in names)
    divided_by = {
        "batch_num_tokens": tokens,
        "global_batch_size": objective.mini_batch_rows,
        "loss_scale_factor": objective.loss_scale_factor,
    }
    loss, metrics = turn_policy_loss(
        log_prob_b_T,
        *tables,
        clip_ratio_low=objective.clip_ratio_low,
        clip_ratio_high=objective.clip_ratio_high,
        clip_scale_B_T=clip_scale_b_T if objective.dynamic_clip else None,
        clip_ratio_c=objective.clip_ratio_c if objective.ratio_level == "token" else None,
        ratio_level=objective.ratio_level,
        loss_agg_mode=objective.loss_agg_mode,
        **divided_by,
    )
    if objective.entropy_coeff:
        mask_b_T = tables[2]
        entropy = aggregate(entropy_b_T, mask_b_T, objective.loss_agg_mode, **divided_by)
        loss = loss - objective.entropy_coeff * entropy
    return loss, metrics


class TwinHost(PackedForward):
    """A step of the twin as a `turns.step.StepHost`. Its rows are in memory, and its estimator is `assign` itself."""

    def __init__(
        self,
        policy: PackedPolicy,
        turns: TurnBatch,
        outcome_B: torch.Tensor,
        group_B: torch.Tensor,
        *,
        step: int,
        planned_steps: int,
        entropy: bool,
        reference: PackedPolicy | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        super().__init__(policy, turns)
        self.step, self.planned_steps, self.last_step = step, planned_steps, planned_steps
        self.metrics: dict[str, float] = {}
        self.state: dict | None = None
        self._turns, self._outcome_B, self._group_B = turns, outcome_B, group_B
        self._entropy, self._say = entropy, say
        self._reference = reference
        self.prompts, self.responses = (
            [torch.tensor(row) for row in ids] for ids in (turns.prompt_ids, turns.response_ids)
        )
        padded_B_T = torch.nn.utils.rnn.pad_sequence(self.responses, batch_first=True)
        self._fields = {"responses": padded_B_T, "response_mask": turns.response_mask_B_T}

    def turns(self, columns: Sequence[str] = ()) -> TurnBatch:
        return self._turns

    def read(self, *names: str, rows: list[int] | None = None) -> dict[str, torch.Tensor]:
        found = {name: self._fields[name] for name in names if name in self._fields}
        return found if rows is None else {name: values[rows] for name, values in found.items()}

    def write(self, name: str, values_B_T: torch.Tensor) -> None:
        self._fields[name] = values_B_T

    def order(self) -> None:
        """The rows are in the order of their prompts already."""

    @torch.no_grad()
    def log_probs(self) -> None:
        mask_B_T = self._turns.response_mask_B_T.bool()
        rows = self.prompts, self.responses, mask_B_T
        log_prob_B_T, entropy_B_T = self._policy.responses(*rows, entropy=self._entropy)
        self.write("old_log_probs", log_prob_B_T)
        if entropy_B_T is not None:
            self.write("entropy", entropy_B_T)

    def score_by_reference(self, rows: Sequence[ScoreRow]) -> torch.Tensor:
        with self._reference.packing():
            return PackedRows(self._reference).score_rows(rows)

    def estimate(self, inputs: StepInputs) -> StepCredit:
        credit = assign(inputs, self._outcome_B, self._group_B, self._turns.response_mask_B_T.bool())
        self.write("advantages", credit.advantage_B_T.float())
        return credit

    def report(self, metrics: Mapping[str, float]) -> None:
        self.metrics.update(metrics)

    def note(self, kind: str, text: str | None) -> None:
        if text:
            self._say(text)

    def keep(self, state: dict | None) -> None:
        self.state = state

    def stop(self) -> None:
        self.last_step = self.step + 1

    def batch(self) -> UpdateBatch:
        """The rows for `update`, once they have their credit."""
        names = ("old_log_probs", "advantages", CLIP_SCALE)
        mask_B_T = self._turns.response_mask_B_T.bool()
        tables = self._turns.turn_ids_B_T, mask_B_T, *(self._fields[name] for name in names)
        return UpdateBatch(self.prompts, self.responses, *tables)


def credited(
    run: CreditRun,
    policy: PackedPolicy,
    turns: TurnBatch,
    outcome_B: torch.Tensor,
    group_B: torch.Tensor,
    *,
    step: int,
    planned_steps: int,
    reference: PackedPolicy | None = None,
) -> tuple[UpdateBatch, StepCredit, dict[str, float]]:
    """(rows for `update`, the step's credit, metrics of gains and tokens). ``step`` counts from 1. ``reference``: of
    info_gain_scorer=reference."""
    steps = {"step": step, "planned_steps": planned_steps, "reference": reference}
    host = TwinHost(policy, turns, outcome_B, group_B, **steps, entropy=run.stage.active)
    inputs, _ = scored(host, run, host.turns())
    credit = give_credit(host, inputs)
    return host.batch(), credit, host.metrics
