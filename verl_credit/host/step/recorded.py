"""Records a run: metrics and rollouts of a step, held-out evaluation once per sampling mode of ``evaluation.modes``,
checkpoints with our state, and the last step of ``max_hours``."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import ray
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.debug import marked_timer

from verl_credit.errors import EvaluationOverrun
from verl_credit.host.hf_rollout.sync import server_name
from verl_credit.host.step.held_out import held_out_rows
from verl_credit.host.step.metrics import check_evaluation_faults
from verl_credit.host.step.rollouts import keep_rollouts
from verl_credit.names import ROLLOUT_NAME
from verl_credit.records.run import events
from verl_credit.records.run.alarms import Watch
from verl_credit.records.run.files import (
    METRICS,
    TRAJECTORIES,
    VALIDATION,
    append_json,
    read_json_lines,
    rewind,
)
from verl_credit.records.run.held_out import write_held_out
from verl_credit.records.run.resume import delete_old, without_limits
from verl_credit.records.run.state import TimeLimit, describe_resume, save_state


class RecordedTrainer(PPOTrainer):
    """Expects ``run_dir``, ``watch``, ``controller`` (SEPA's, or None), ``_turns`` and ``_credited`` (of the step)."""

    _evaluation_mode: str | None = None

    def __init__(self, config):
        self._limit = None if config.max_hours is None else TimeLimit(config.max_hours)
        self._shortened_from: int | None = None
        self._saved_step: int | None = None
        self._stages: set[str] = set()
        self._noted: set[str] = set()
        self._alarms: Watch | None = None
        self._restored: dict[str, float] = {}
        super().__init__(config)

    @property
    def planned_steps(self) -> int:
        """The number of steps of the whole run; verl's number is smaller once max_hours has made a step the last."""
        return self._shortened_from or self.total_training_steps

    def _update_actor(self, batch, metrics):
        own = self.run_dir, batch, self._turns, self._credited, self.global_steps
        keep_rollouts(*own, self.config, self.tokenizer)
        return super()._update_actor(batch, metrics)

    def step(self, metrics, timing_raw):
        batch = super().step(metrics, timing_raw)
        self._trained, self._metrics_so_far = batch, metrics  # for the checkpoint
        return batch

    def _compute_metrics(self, batch, metrics, timing_raw, global_steps, epoch):
        super()._compute_metrics(batch, metrics, timing_raw, global_steps=global_steps, epoch=epoch)
        self._alarm(global_steps, metrics)
        append_json(self.run_dir / METRICS, {"step": global_steps, **metrics})
        self._stage("the first step is finished")
        self._keep_time(timing_raw)

    def _alarm(self, step: int, metrics: dict) -> None:
        if self._alarms is None:
            workers = self.config.actor_rollout_ref
            remedies = {"half_lr": f"{workers.actor.optim.lr / 2:g}", "twice_n": 2 * workers.rollout.n}
            self._alarms = Watch(self.run_dir, step - 1, remedies)
        for kind, text in self._alarms.see(step, metrics):
            self._note_once(kind, text)

    def _note_once(self, kind: str, text: str | None) -> None:
        """Notes a kind of event once in a run; the metrics have every step's numbers."""
        if text and kind not in self._noted:
            events.note(self.run_dir, kind, text)
            self._noted.add(kind)

    def _stage(self, text: str) -> None:
        """Records how far the start of this process is, once."""
        if text not in self._stages:
            events.record(self.run_dir, events.STAGE, text)
            self._stages.add(text)

    def _keep_time(self, timing_raw: dict[str, float]) -> None:
        """Makes the next step the last when ``max_hours`` leaves time for one more only: it is then saved and evaluated."""
        done = self.global_steps >= self.total_training_steps
        timing_s = {
            name: timing_raw[name] for name in ("step", "save_checkpoint", "testing") if name in timing_raw
        }
        if self._limit is not None and not done and self._limit.next_is_last(timing_s):
            self._shortened_from = self.total_training_steps
            self.total_training_steps = self.global_steps + 1
            text = (
                f"max_hours={self.config.max_hours:g}: step {self.total_training_steps} is the last of this run; the same "
                "command goes on from it"
            )
            events.note(self.run_dir, "max_hours", text)

    def _validate(self):
        """A step that was evaluated before a resume is not evaluated again."""
        for row in read_json_lines(self.run_dir / VALIDATION):
            if row["step"] == self.global_steps:
                return {name: value for name, value in row.items() if name != "step"}
        hours, began = self.config.evaluation.max_hours, time.monotonic()

        def in_time() -> None:
            if hours is not None and time.monotonic() - began > 3600 * hours:
                text = f"evaluation.max_hours={hours:g}: the evaluation after step {self.global_steps} takes longer"
                events.note(self.run_dir, events.EVALUATION_OVERRUN, text)
                raise EvaluationOverrun(text)

        loader, merged = self.val_dataloader, {}
        kept: list[dict] | None = [] if self.config.evaluation.keep_trajectories else None
        try:
            for mode in self.config.evaluation.modes:
                samples = 1 if mode == "greedy" else self.config.actor_rollout_ref.rollout.val_kwargs.n
                rows = len(self.val_dataset) * samples
                self.watch.begin(rows)
                self.watch.seen = None if kept is None else lambda batch: kept.extend(self._held_out(batch))
                self._evaluation_mode, self.val_dataloader = mode, with_mode(loader, mode, samples, in_time)
                merged |= super()._validate()
                self.watch.settle(rows - len(self.watch.errors))
        finally:
            self.val_dataloader, self._evaluation_mode, self.watch.seen = loader, None, None
        faulty = self.agent_loop_manager.drain_held_out_faults()
        check_evaluation_faults(merged, self.config.faults.max_tool_faults, self.config.search.url, faulty)
        if kept is not None:
            write_held_out(self.run_dir, self.global_steps, kept)
        append_json(self.run_dir / VALIDATION, {"step": self.global_steps, **merged})
        in_time()
        return merged

    def _held_out(self, batch) -> list[dict]:
        return held_out_rows(batch, self._evaluation_mode, self.tokenizer)

    def _dump_generations(self, inputs, outputs, gts, scores, reward_extra_infos_dict, dump_path):
        """verl names the file by the step alone: each mode has a folder, or the last one would overwrite the others."""
        folder = Path(dump_path) / self._evaluation_mode if self._evaluation_mode else dump_path
        super()._dump_generations(inputs, outputs, gts, scores, reward_extra_infos_dict, str(folder))

    def _val_metrics_update(self, sources, uids, infos, turns, **counts):
        """Appends the mode to data sources ("lab" becomes "lab-greedy") in the metrics' names only: reward functions see the
        source as it is. Adds the number of questions. verl averages every value of the reward function; a list per turn
        (`column:NAME`) has no mean, therefore verl gets only values that are no containers."""
        mode, several = self._evaluation_mode, (list, tuple, dict, set, np.ndarray)
        infos = {
            name: values
            for name, values in infos.items()
            if not any(isinstance(value, several) for value in values)
        }
        # 0.9.1 gives the counts as expected_acc_counts, releases before it give none.
        counts = {
            key: expected and {(f"{source}-{mode}", uid): n for (source, uid), n in expected.items()}
            for key, expected in counts.items()
        }
        named = [f"{source}-{mode}" for source in sources]
        metrics = super()._val_metrics_update(named, uids, infos, turns, **counts)
        for source in set(named):
            questions = {uid for uid, of in zip(uids, named, strict=True) if of == source}
            metrics[f"val-aux/{source}/questions"] = len(questions)
        return {k.replace("val-aux/num_turns/", f"val-aux/num_turns-{mode}/"): v for k, v in metrics.items()}

    def _save_checkpoint(self):
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        sepa = None if self.controller is None else self.controller.state_dict()
        metrics = self._metrics_but_times()
        save_state(folder, self.config, self.global_steps, metrics, sepa, self.planned_steps)
        config, self.config = self.config, without_limits(self.config)
        try:
            super()._save_checkpoint()
        finally:
            self.config = config
        self._saved_step = self.global_steps
        delete_old(config, self.global_steps)

    def _metrics_but_times(self) -> dict[str, float]:
        """The metrics of the step that is being saved. verl computes most of them later, and the run could end before."""
        metrics, counted = dict(self._metrics_so_far), self._rollout_moe_lb_metrics_accumulator
        self._rollout_moe_lb_metrics_accumulator = copy.deepcopy(counted)  # verl counts the step later
        try:
            epoch = (self.global_steps - 1) // self.steps_per_epoch
            unknown = {"step": float("nan")}
            super()._compute_metrics(
                self._trained, metrics, unknown, global_steps=self.global_steps, epoch=epoch
            )
        finally:
            self._rollout_moe_lb_metrics_accumulator = counted
        return {name: value for name, value in metrics.items() if not name.startswith(("timing_", "perf/"))}

    def _load_checkpoint(self):
        super()._load_checkpoint()
        for name in (METRICS, VALIDATION, TRAJECTORIES):
            rewind(self.run_dir / name, self.global_steps)
        if self.global_steps > 0:
            message, saved, sepa = describe_resume(self.config, self.global_steps)
            if self.controller is not None and sepa is not None:
                self.controller.load_state_dict(sepa)
            events.note(self.run_dir, "resume", message)
            self._restored = saved

    def on_train_begin(self):
        """Records, after the first evaluation, a step that an earlier run saved but did not record."""
        super().on_train_begin()
        step = self.global_steps - 1
        if self._restored and step not in {row["step"] for row in read_json_lines(self.run_dir / METRICS)}:
            evaluated = {row["step"]: row for row in read_json_lines(self.run_dir / VALIDATION)}
            append_json(self.run_dir / METRICS, {"step": step} | self._restored | evaluated.get(step, {}))

    # The rollout engine compares checksums at every sync; here it is recorded that the weights moved at all.

    def on_init_end(self):
        self._stage("the rollout engine is up")
        super().on_init_end()
        self._stage("the rollout engine has the actor's weights")
        self._weights = self._rollout_checksum()

    def on_step_end(self):
        """verl has just saved, where trainer.save_freq says so, and has not yet moved the weights to the rollout engine."""
        if self.global_steps in self.config.keep_checkpoints and self._saved_step != self.global_steps:
            with marked_timer("save_checkpoint", self.timing_raw):
                self._save_checkpoint()
        super().on_step_end()
        before, self._weights = self._weights, self._rollout_checksum()
        if self._weights is not None:
            changed = {"credit/sync/weights_changed": float(before != self._weights)}
            self._pending_sync_metrics = self._consume_sync_metrics() | changed

    def _rollout_checksum(self) -> str | None:
        """Checksum of the weights the first rollout server holds; None for engines that give none."""
        return self._of_rollout_server("weights_checksum")

    def _of_rollout_server(self, method: str) -> str | None:
        if self.config.actor_rollout_ref.rollout.name != ROLLOUT_NAME:
            return None
        return ray.get(getattr(ray.get_actor(server_name(0)), method).remote())


def with_mode(
    loader: Iterable[dict], mode: str, samples: int, before_batch: Callable[[], None]
) -> Iterator[dict]:
    """The validation data with a sampling mode and a number of samples on every row.

    verl fixes validation sampling once for all workers. Therefore our agent loops read the mode from the row, so that greedy
    and sampled accuracy come from the same weights. verl's workers read the number of samples from the row, too.
    """
    for batch in loader:
        before_batch()
        given = {}
        for name, value in (("sampling", mode), ("__rollout_n__", samples)):
            given[name] = np.empty(len(batch["raw_prompt"]), dtype=object)
            given[name][:] = value
        yield {**batch, **given}
