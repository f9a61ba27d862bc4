"""Writes a run's row into the table of trials for `train`; an error here never changes how `train` ends."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_credit.cli.saved_run import CONFIG
from verl_credit.errors import ExitCode, Terminated, TooLargeError, one_line
from verl_credit.names import ADV_ESTIMATOR, OUR_REWARD
from verl_credit.records.lineage import FailureLabel, LineageStore, Trial, verdict
from verl_credit.records.run import events
from verl_credit.records.run.events import Reason
from verl_credit.records.run.files import DamagedFile
from verl_credit.records.run.state import planned_in_all
from verl_credit.records.run.validation import EM
from verl_credit.redact import redact

if TYPE_CHECKING:
    from verl_credit.records.report.run_data import Run

LABELS = {
    Reason.TIME_LIMIT: FailureLabel.TRAIN_BUDGET_OVERRUN,
    Reason.EVALUATION_OVERRUN: FailureLabel.EVAL_BUDGET_OVERRUN,
    Reason.FAILED: FailureLabel.CRASH,
    Reason.REFUSED: FailureLabel.PREFLIGHT_CRASH,
    Reason.FAULT: FailureLabel.DISQUALIFIED,
    Reason.INTERRUPTED: FailureLabel.HARNESS_ABORT,
}
ERRORS = ((Terminated, FailureLabel.TRAIN_BUDGET_OVERRUN), (TooLargeError, FailureLabel.SIZE_BLOCKED))


def store_folder(config: DictConfig) -> Path:
    """Returns ``lineage.dir``, or `lineage` beside the run's folder."""
    given = config.lineage.dir or Path(config.run_dir).expanduser().resolve().parent / "lineage"
    return Path(given).expanduser().resolve()


def kept_when(config: DictConfig, best: str = "the best one kept") -> str:
    """Describes the rule by which this run's trial is kept."""
    ours = OmegaConf.select(config, "reward.custom_reward_function.path") == OUR_REWARD
    metric = config.lineage.metric or f"held-out exact match{'' if ours else ' (or reward)'}"
    way = "falls" if config.lineage.lower_is_better else "gains"
    return f"kept when {metric} {way} by more than {config.lineage.threshold:g} over {best}"


class TrialRow:
    """The row of a start of `train`: ``begin`` is called before the checks, ``end`` at every end of the run.

    A killed run has no row; its next start is the same trial. A run that has a row and is started again is a new trial,
    NAME.2, whose parent is the earlier trial. A failure here is a text, because the run may not depend on it.
    """

    def __init__(self, config: DictConfig) -> None:
        self.config, self.run_dir, self.started = config, Path(config.run_dir), time.time()
        self.timestamp = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        self.store = LineageStore(store_folder(config), lower_is_better=config.lineage.lower_is_better)
        self.name = config.lineage.exp_id or self.run_dir.name.removeprefix("exp_").strip() or "run"
        self.exp_id, self.parent, self.steps_before, self.failed = "", "", 0, False

    def begin(self) -> str:
        """Chooses the trial's id and parent; returns a line about it."""
        return self._try(self._begin)

    def end(self, code: ExitCode, why: str, error: BaseException | None) -> str:
        """Adds the row; returns a line about it, empty for a start without remaining steps where the run has a row."""
        return self._try(partial(self._end, code, why, error))

    def _try(self, work: Callable[[], str]) -> str:
        try:
            return work()
        except Exception as error:
            self.failed = True
            return one_line(f"trial: nothing is written down: {error}")

    def _begin(self) -> str:
        config, trials = self.config.lineage, self.store.all_trials()
        mine, best = self._mine(trials), self.store.best()
        self.parent = config.parent or (mine[-1].exp_id if mine else best.exp_id if best else "")
        self.store.root.mkdir(parents=True, exist_ok=True)  # a folder that cannot be written is known now
        self.exp_id, self.steps_before = self._free_id(trials), events.steps_done(self.run_dir) if mine else 0
        with open_dict(self.config):  # so that the run's files and verl's loggers know the trial
            config.exp_id, config.parent = self.exp_id, self.parent or None
        rule = "the first with a metric is the baseline"
        if best:
            rule = kept_when(self.config, f"{best.label} ({best.core_metric:.6g})")
        line = f"trial exp_{self.exp_id} in {self.store.path}: {rule}"
        if config.parent and self.parent not in {trial.exp_id for trial in trials}:
            line += f"; lineage.parent={self.parent} is not there"
        return line if config.hypothesis else f"{line}; no lineage.hypothesis was given"

    def _mine(self, trials: tuple[Trial, ...]) -> list[Trial]:
        return [trial for trial in trials if trial.job_name == str(self.run_dir)]

    def _free_id(self, trials: tuple[Trial, ...]) -> str:
        """Returns NAME, or the first of NAME.2, NAME.3, ... that has no row."""
        ended = {trial.exp_id for trial in trials}
        names = itertools.chain([self.name], (f"{self.name}.{number}" for number in itertools.count(2)))
        return next(name for name in names if name not in ended)

    def _end(self, code: ExitCode, why: str, error: BaseException | None) -> str:
        try:
            reason, why = events.how(self.run_dir, code, why, planned_in_all(self.config))
        except DamagedFile:  # the damaged file is the reason of the refusal
            reason = events.REASONS[code]
        if reason is Reason.NOTHING_LEFT and self._mine(self.store.all_trials()):
            return ""
        if not self.exp_id:
            self._begin()
        run = None
        with suppress(FileNotFoundError, ValueError):  # no step was made
            from verl_credit.records.report.run_data import read_run

            run = read_run(self.run_dir)
        metric = held_out_metric(self.config, run)
        label = next((label for kind, label in ERRORS if isinstance(error, kind)), LABELS.get(reason))
        trial = self.store.append(partial(self._row, label, metric, run, why))
        result = metric.why if metric.value is None else f"{metric.name} {metric.value:.6g}"
        return one_line(f"trial {trial.label}: {trial.status}, {result}; {self.store.path}")

    def _row(
        self, label: FailureLabel | None, metric: Metric, run: Run | None, why: str, trials: tuple[Trial, ...]
    ) -> Trial:
        config, algorithm = self.config.lineage, self.config.algorithm
        turns = "info_gain_norm_mode" if algorithm.adv_estimator == ADV_ESTIMATOR else "adv_estimator"
        rule = {"threshold": config.threshold, "lower_is_better": config.lower_is_better}
        judged = verdict(metric.value, trials, **rule)
        expected, snapshot = config.expected_delta, self.run_dir / CONFIG
        steps = [row for row in run.metrics if row["step"] > self.steps_before] if run else []
        planned = planned_in_all(self.config)
        done = f"{len(steps)} of {planned}" if planned else f"{len(steps)}"
        notes = [f"alpha={algorithm.adv_rescale_alpha:g} gamma={algorithm.gamma:g}, {done} steps"]
        if reason := why or metric.why or judged.why:
            notes.append(one_line(reason)[:1000])
        return Trial(
            exp_id=self._free_id(trials),  # another trial may have ended with the id of the start
            timestamp=self.timestamp,
            specialist=str(self.config.credit_preset or algorithm[turns]),
            parent_exp=self.parent,
            baseline_exp=next((t.exp_id for t in trials if t.status is FailureLabel.BASELINE), ""),
            domain=metric.domain,
            hypothesis=config.hypothesis or "",
            expected_delta=f"{expected:+g}" if isinstance(expected, int | float) else expected or "",
            status=label or judged.status,
            core_metric=metric.value,
            val_bpb=None,
            delta_vs_best=judged.delta_vs_best,
            train_s=sum(row.get("timing_s/step", 0.0) for row in steps) if steps else None,
            total_s=time.time() - self.started,
            job_name=str(self.run_dir),
            snapshot_path=str(snapshot) if snapshot.exists() else "",
            notes=redact("; ".join(notes)),
        )


class Metric(NamedTuple):
    """The held-out metric after the last evaluated step, or ``why`` there is none."""

    name: str = ""
    value: float | None = None
    domain: str = ""
    why: str = ""


def held_out_metric(config: DictConfig, run: Run | None) -> Metric:
    """Returns ``lineage.metric``, or exact match: greedy where it is evaluated, Σ right / Σ questions over all sources. The
    reward takes its place where no source has it.

    An evaluation before the first step does not measure the trial. There is no metric where data.val_files holds a file of
    data.train_files, because its questions are not held out.
    """
    none = "no held-out metric: "
    if shared := sorted(_files(config.data.train_files) & _files(config.data.val_files)):
        return Metric(why=f"{none}{shared[0]} is in data.val_files and in data.train_files")
    if run is None:
        return Metric(why=f"{none}no step was made")
    if name := config.lineage.metric:
        measured = [row[name] for row in run.validation if name in row and row["step"] > 0]
        if not measured:
            return Metric(why=f"{none}validation.jsonl has no {name} after a training step")
        return Metric(name, measured[-1])
    entries = [one for one in run.held_out() if one.score.steps[-1] > 0]
    if not entries:
        return Metric(
            why=f"{none}no exact match or reward after a training step; lineage.metric names another"
        )
    measure = min(one.measure for one in entries)  # em sorts before reward
    entries = [one for one in entries if one.measure == measure]
    mode = min(one.mode for one in entries)  # greedy sorts before sampled
    step = max(one.score.steps[-1] for one in entries if one.mode == mode)
    found = [one for one in entries if (one.mode, one.score.steps[-1]) == (mode, step)]
    counts = [dict(zip(one.questions.steps, one.questions.values, strict=True))[step] for one in found]
    share = sum(one.score.values[-1] * count for one, count in zip(found, counts, strict=True)) / sum(counts)
    return Metric(
        f"{'exact match' if measure == EM else 'reward'}, {mode}",
        share,
        ", ".join(one.source for one in found),
    )


def _files(value: object) -> set[str]:
    names = list(value) if OmegaConf.is_list(value) else [] if value is None else [value]
    return {str(Path(str(name)).expanduser().resolve()) for name in names}
