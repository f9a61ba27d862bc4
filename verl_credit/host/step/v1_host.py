"""verl's v1 trainer as the host of a step's credit (`turns.step.StepHost`). Its rows are in TransferQueue (`store`)."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from omegaconf import DictConfig
from verl.utils import tensordict_utils as tu

from verl_credit.config.fit import reference_in_actor, tokens_per_micro_batch
from verl_credit.host.step import store
from verl_credit.host.step.estimator import bring_turns
from verl_credit.names import BRANCH_LOG_PROBS, BRANCHES, SCORE_BRANCHES
from verl_credit.records.run import events
from verl_credit.turns.rollout.book import TurnBatch
from verl_credit.turns.score.scorers import ScoreRow
from verl_credit.turns.step.assign import StepCredit, StepInputs

NOW, AT_SYNC = "now", 0
"""Copies of the weights: verl numbers its own, the first is that of the last sync."""


class V1Host:
    """One for a run; `enter` begins a step. ``batch`` is the handle of its rows with all fields that were written.

    ``log_probs`` and ``estimate``: verl's own methods of the trainer, from a batch and metrics to the next batch.
    """

    def __init__(self, config: DictConfig, log_probs: Callable, estimate: Callable) -> None:
        self.config, self.run_dir = config, Path(config.run_dir)
        self.budget = tokens_per_micro_batch(config)
        self.state: dict | None = None
        self.reference = None  # the workers of verl's reference, where the run has one
        self.planned_steps: int | None = None
        self._log_probs, self._estimate = log_probs, estimate
        self._noted: set[str] = set()
        self._issued = (-1, 0)  # (step, prompts handed out in it)

    def enter(
        self, batch, metrics: dict, *, step: int, last_step: int, workers, at_sync: bool = False
    ) -> None:
        """``at_sync``: extra rows are scored by the weights of the last sync, which the workers have a copy of."""
        self.batch, self._metrics, self.step, self.last_step = batch, metrics, step, last_step
        self.planned_steps = self.planned_steps or last_step  # the first is that of the whole run
        self.workers, self._at_sync = workers, at_sync

    # --- the rows ----------------------------------------------------------------------------------

    def turns(self, columns: Sequence[str] = ()) -> TurnBatch:
        self._turns = store.fetch_turn_batch(self.batch, columns, self.config.algorithm.turn_ids)
        if masked := self._turns.ids_from_mask:
            rows = f"{masked} of {len(self._turns.keys)} rows of step {self.step}"
            self.note("turn_ids", f"turns are runs of the response mask in {rows} (algorithm.turn_ids)")
        self.batch = store.write_turn_ids(self.batch, self._turns)
        return self._turns

    def read(self, *names: str, rows: list[int] | None = None) -> Mapping[str, torch.Tensor]:
        found = store.read(self.batch, *names, rows=rows)
        return {name: found[name].to_padded_tensor(padding=0) for name in names if name in found}

    def write(self, name: str, values_B_T: torch.Tensor) -> None:
        self.batch = store.write_tokens(self.batch, self._turns, name, values_B_T)

    def order(self) -> None:
        self.batch.reorder(sorted(range(len(self.batch.keys)), key=lambda row: self.batch.keys[row]))

    def name_prompts(self, batch, step: int):
        """verl draws random prompt ids; ours follow from seed, step and place, so row order repeats."""
        before, issued = self._issued
        first = issued if before == step else 0
        self._issued = (step, first + len(batch))
        names = [f"{self.config.seed}/{step}/{number}" for number in range(first, first + len(batch))]
        batch.pop("uid")
        uids = [str(uuid.uuid5(uuid.NAMESPACE_OID, name)) for name in names]
        tu.assign_non_tensor_stack(batch, "uid", uids)
        return batch

    # --- log-probs and credit ------------------------------------------------------------------------

    def carry(self, branches: torch.Tensor) -> None:
        self.batch = store.write(self.batch, {BRANCHES: branches})
        self.batch.extra_info[SCORE_BRANCHES] = True

    def log_probs(self) -> None:
        start = time.perf_counter()
        self.batch = self._log_probs(self.batch, self._metrics)
        self.batch.extra_info.pop(SCORE_BRANCHES, None)
        self.forward_s = time.perf_counter() - start

    def carried(self) -> list[torch.Tensor]:
        return list(store.read(self.batch, BRANCH_LOG_PROBS)[BRANCH_LOG_PROBS].unbind())

    def score_rows(self, rows: Sequence[ScoreRow]) -> torch.Tensor:
        with self._weights_of_sync():
            return score_rows(self.workers, self.config, rows)

    def score_by_reference(self, rows: Sequence[ScoreRow]) -> torch.Tensor:
        return score_rows(self.reference, self.config, rows, reference=True)

    @contextmanager
    def _weights_of_sync(self) -> Iterator[None]:
        if not self._at_sync:
            yield
            return
        self.workers.save_model_to_cpu(NOW)
        self.workers.restore_model_from_cpu(AT_SYNC)
        try:
            yield
        finally:
            self.workers.restore_model_from_cpu(NOW)
            self.workers.clear_cpu_model(NOW)

    def estimate(self, inputs: StepInputs) -> StepCredit | None:
        with bring_turns(inputs) as brought:
            self.batch = self._estimate(self.batch, self._metrics)
        return brought.credit

    # --- the run -------------------------------------------------------------------------------------

    def report(self, metrics: Mapping[str, float]) -> None:
        self._metrics.update(metrics)

    def note(self, kind: str, text: str | None) -> None:
        if text and kind not in self._noted:
            events.note(self.run_dir, kind, text)
            self._noted.add(kind)

    def keep(self, state: dict | None) -> None:
        self.state = state

    def stop(self) -> None:
        self.last_step = self.step + 1


def score_rows(
    workers, config: DictConfig, rows: Sequence[ScoreRow], *, reference: bool = False
) -> torch.Tensor:
    """`store.score_rows` by the trainer's workers, or by its reference."""
    apart = reference and not reference_in_actor(config)
    mesh, known = "ref" if apart else "actor", workers._dispatch_info
    if mesh not in known:  # verl fills this entry at the first step
        known[mesh] = workers._query_dispatch_info(mesh)
    keys = config.actor_rollout_ref["ref" if apart else "rollout"]
    # Dynamic batching takes any number of rows.
    fixed = 1 if keys.log_prob_use_dynamic_bsz else keys.log_prob_micro_batch_size_per_gpu
    compute = workers.compute_ref_log_prob if apart else workers.compute_log_prob
    split = {"dp_size": max(known[mesh]) + 1, "micro_batch": fixed}
    return store.score_rows(compute, rows, **split, adapter=apart or not reference)
