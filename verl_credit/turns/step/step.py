"""The credit of a step through a trainer, whichever trainer that is: `StepHost` is all that a step needs of it.

verl's v1 trainer (`host.step.v1_host`) and the twin (`study.twin_step`) are such hosts. A trainer calls `scored` in place of
its forward for log-probs, and `credited` where it computes advantages; between the two it may change rewards and masks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from verl_credit.lazy import torch
from verl_credit.names import CLIP_SCALE
from verl_credit.turns.rollout.book import TurnBatch
from verl_credit.turns.score.gains import plan_gains
from verl_credit.turns.score.scorers import Forward
from verl_credit.turns.step.assign import CreditRun, StepCredit, StepInputs, step_inputs
from verl_credit.turns.step.token_stage import TokenInputs


class StepHost(Forward, Protocol):
    """A trainer in one step: its rows, their log-probs, its estimator, and what a run writes down.

    ``Forward`` has the log-probs of extra rows (`score_rows`) and of branches (`carry`, `carried`).
    """

    step: int
    """The number of the step, from 1."""
    planned_steps: int
    """The number of steps of the whole run."""

    def turns(self, columns: Sequence[str] = ()) -> TurnBatch:
        """Reads the rows with their turns. ``columns``: of the data file."""

    def read(self, *names: str, rows: list[int] | None = None) -> Mapping[str, torch.Tensor]:
        """Reads per-token fields [B, T] of all rows or of ``rows``, padded with 0, without those that the step lacks."""

    def write(self, name: str, values_B_T: torch.Tensor) -> None:
        """Writes a per-token field of all rows."""

    def order(self) -> None:
        """Brings the rows into an order that depends on their names alone, so that a step can be repeated."""

    def log_probs(self) -> None:
        """Computes ``old_log_probs`` of the rows, with the branches that `carry` has appended."""

    def estimate(self, inputs: StepInputs) -> StepCredit | None:
        """Computes outcomes, calls the estimator and writes ``advantages``; None where another estimator is registered."""

    def report(self, metrics: Mapping[str, float]) -> None:
        """Adds metrics to those of the step."""

    def note(self, kind: str, text: str | None) -> None:
        """Writes an event of the run, the first of each kind; None is no event."""

    def keep(self, state: dict | None) -> None:
        """The state to save with the checkpoint of this step, for `restore`."""

    def stop(self) -> None:
        """Makes the next step the last one: it is saved and evaluated."""


SEPA, TURN_VALUES = "sepa", "values"
"""The parts of the state that `keep` gets: plain data, and a dict with tensors."""


def scored(
    host: StepHost, run: CreditRun, turns: TurnBatch, rollouts: TurnBatch | None = None
) -> tuple[StepInputs, dict[str, float]]:
    """Computes the step's log-probs and scores its gold answers with them, as the run's scorer does; returns also metrics of
    the time that this took. ``rollouts``: ``turns`` joined, where they are already."""
    began = time.perf_counter()
    metrics: dict[str, float] = {}
    now = run.settings.scores_at(host.step)
    plan = plan_gains(turns, run.settings, run.tokenizer, scored=now, rollouts=rollouts)
    if plan.scored:
        plan = plan.scorer.before_forward(plan, host)
    start = time.perf_counter()
    host.log_probs()
    forward_s = time.perf_counter() - start
    inputs = step_inputs(run, plan, host, metrics, step=host.step, planned_steps=host.planned_steps)
    host.report(metrics)
    around_s = time.perf_counter() - began - forward_s
    return inputs, plan.scorer.cost(plan, around_s, forward_s) if plan.scored else {}


def credited(host: StepHost, inputs: StepInputs) -> StepCredit | None:
    """Gives every token of the step its advantage and its clip scale; None where another estimator gave the advantages."""
    stage, turns = inputs.run.stage, inputs.turns.outputs or inputs.turns  # row for row as the host's
    if stage is not None and stage.active:
        tokens = token_inputs(host, turns.row_valid_B, mask_B_T=turns.response_mask_B_T)
        inputs = replace(inputs, tokens=tokens)
    if inputs.run.values is not None and (field := inputs.run.values.provider.field):
        inputs = replace(inputs, value_B_T=host.read(field).get(field))
    credit = host.estimate(inputs)
    ones_B_T = torch.ones(turns.turn_ids_B_T.shape)
    host.write(CLIP_SCALE, ones_B_T if credit is None else credit.clip_scale_B_T.float())
    host.keep(state_of(inputs.run))
    if credit is not None:
        host.report(credit.metrics)
    return credit


def state_of(run: CreditRun) -> dict | None:
    """What changes from step to step, for a checkpoint: the SEPA controller and the values, where there are such."""
    return {name: part.state_dict() for name, part in _parts(run).items()} or None


def restore(run: CreditRun, state: dict | None) -> None:
    """Takes a checkpoint's state over. None: the checkpoint has none."""
    for name, part in _parts(run).items():
        if saved := (state or {}).get(name):
            part.load_state_dict(saved)


def _parts(run: CreditRun) -> dict:
    found = {SEPA: None if run.stage is None else run.stage.controller, TURN_VALUES: run.values}
    return {name: part for name, part in found.items() if part is not None}


def token_inputs(
    host: StepHost,
    row_valid_B: torch.Tensor,
    *,
    mask_B_T: torch.Tensor | None = None,
    rows: list[int] | None = None,
) -> TokenInputs:
    """Log-probs and entropies of the policy that is trained, as the trainer computed them for this step.

    A trainer that takes the rollout engine's log-probs (``rollout_correction.bypass_mode``) has no entropies.
    ``mask_B_T``: the response mask, if it is known. ``row_valid_B``: of ``rows``, or of all.
    """
    names = ["old_log_probs", "responses", "entropy", *(["response_mask"] if mask_B_T is None else [])]
    found = host.read(*names, rows=rows)
    return TokenInputs(
        step=host.step,
        mask_B_T=(found["response_mask"] if mask_B_T is None else mask_B_T).bool(),
        token_ids_B_T=found["responses"],
        log_prob_B_T=found["old_log_probs"],
        entropy_B_T=found.get("entropy"),
        row_valid_B=row_valid_B,
    )
