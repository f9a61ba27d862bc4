"""Writes a run's row into the table of trials for `train`; an error here never changes how `train` ends."""

from __future__ import annotations

import hashlib
import itertools
import json
import shlex
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf, open_dict

import verl_credit
from verl_credit.cli.saved_run import CONFIG
from verl_credit.errors import ExitCode, Terminated, TooLargeError, one_line
from verl_credit.names import ADV_ESTIMATOR
from verl_credit.recipe.machine import GIB, Facts
from verl_credit.records.lineage import FailureLabel, LineageStore, Trial, verdict
from verl_credit.records.run import events
from verl_credit.records.run.events import Reason
from verl_credit.records.run.files import DamagedFile
from verl_credit.records.run.state import deciding_keys, planned_in_all
from verl_credit.records.run.versions import code_version, installed_versions
from verl_credit.redact import redact

if TYPE_CHECKING:
    from verl_credit.cli.train.trial_numbers import Metric

LABELS = {
    Reason.TIME_LIMIT: FailureLabel.TRAIN_BUDGET_OVERRUN,
    Reason.EVALUATION_OVERRUN: FailureLabel.EVAL_BUDGET_OVERRUN,
    Reason.FAILED: FailureLabel.CRASH,
    Reason.REFUSED: FailureLabel.PREFLIGHT_CRASH,
    Reason.FAULT: FailureLabel.DISQUALIFIED,
    Reason.INTERRUPTED: FailureLabel.HARNESS_ABORT,
}


def store_folder(config: DictConfig) -> Path:
    """``lineage.dir``, or `lineage` beside the run's folder."""
    if config.lineage.dir:
        return Path(config.lineage.dir).expanduser().resolve()
    return Path(config.run_dir).expanduser().resolve().parent / "lineage"


def kept_when(config: DictConfig, best: str = "the best one kept") -> str:
    """Describes the rule by which this run's trial is kept."""
    metric = config.lineage.metric or "held-out exact match"
    way = "falls" if config.lineage.lower_is_better else "gains"
    return f"kept when {metric} {way} by more than {config.lineage.threshold:g} over {best}"


class TrialRow:
    """The row of a start of `train`: ``begin`` is called before the checks, ``end`` at every end of the run.

    A killed run has begun and has no row; its next start continues the same trial. A run that has a row and is started
    again is a new trial, NAME.2, whose parent is the earlier trial: a row is final. A failure here is returned as a text,
    because neither the run nor its exit code may depend on it.
    """

    def __init__(self, config: DictConfig, command: str) -> None:
        self.config, self.command = config, command
        self.run_dir, self.started = Path(config.run_dir), time.time()
        self.timestamp = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        self.store = LineageStore(store_folder(config), lower_is_better=config.lineage.lower_is_better)
        self.exp_id, self.parent, self.steps_before = "", "", 0
        self.facts: dict[str, Any] = {}
        self.failed = False

    def begin(self) -> str:
        """Records the trial's beginning; returns a line about it."""
        return self._try(self._begin)

    def machine(self, facts: Facts) -> None:
        devices = [{"name": one.name, "memory_gib": round(one.total / GIB, 1)} for one in facts.devices]
        memory = round(facts.memory.total / GIB, 1)
        self.facts["hardware"] = {"devices": devices, "cpus": facts.cpus, "memory_gib": memory}

    def end(self, code: ExitCode, why: str, error: BaseException | None) -> str:
        """Adds the row; returns a line about it. The line is empty for a start without remaining steps, unless an earlier
        start was killed before it wrote a row."""
        return self._try(partial(self._end, code, why, error))

    def _try(self, work) -> str:
        try:
            return work()
        except Exception as error:
            self.failed = True
            return one_line(f"trial: nothing is written down: {error}")

    def _begin(self) -> str:
        config, trials = self.config.lineage, self.store.all_trials()
        mine = [trial for trial in trials if trial.job_name == str(self.run_dir)]
        best = self.store.best()
        self.parent = config.parent or (mine[-1].exp_id if mine else best.exp_id if best else "")
        world_seed = OmegaConf.select(self.config, "lab.world_seed")
        deciding = json.dumps(deciding_keys(self.config), sort_keys=True)
        facts = {
            "timestamp": self.timestamp,
            "job_name": str(self.run_dir),
            "parent_exp": self.parent,
            "hypothesis": config.hypothesis,
            "expected_delta": config.expected_delta,
            "threshold": config.threshold,
            "lower_is_better": config.lower_is_better,
            "command": self.command,
            "overrides": [word for word in shlex.split(self.command) if "=" in word],
            # Equal hashes mean equal computations: they cover every key that can change a number, and the seed.
            "config_sha256": hashlib.sha256(deciding.encode()).hexdigest(),
            "seeds": {"seed": self.config.seed, "world_seed": world_seed},
            "code": code_version(Path(verl_credit.__file__).parent),
            "versions": installed_versions(),
        }
        self.exp_id = self.store.start(self._free_id, lambda: facts | {"steps_before": self.steps_before})
        with open_dict(self.config):  # so that the run's files and verl's loggers know the trial
            config.exp_id, config.parent = self.exp_id, self.parent or None
        rule = "the first with a metric is the baseline"
        if best:
            rule = kept_when(self.config, f"{best.label} ({best.core_metric:.6g})")
        line = f"trial exp_{self.exp_id} in {self.store.path}: {rule}"
        if config.parent and self.parent not in {trial.exp_id for trial in trials}:
            line += f"; lineage.parent={self.parent} is not there"
        return line if config.hypothesis else f"{line}; no lineage.hypothesis was given"

    def _free_id(self, trials: tuple[Trial, ...], unfinished: Mapping[str, dict]) -> str:
        """Returns NAME, or the first of NAME.2, NAME.3, ... that has no row and is not another folder's."""
        name = self.config.lineage.exp_id or self.run_dir.name.removeprefix("exp_").strip() or "run"
        ended = {trial.exp_id for trial in trials}
        for number in itertools.count(1):
            exp_id = name if number == 1 else f"{name}.{number}"
            open_one = unfinished.get(exp_id)
            if exp_id not in ended and (open_one is None or open_one.get("job_name") == str(self.run_dir)):
                before = open_one.get("steps_before") if open_one else None
                self.steps_before = before if isinstance(before, int) else events.steps_done(self.run_dir)
                return exp_id

    def _end(self, code: ExitCode, why: str, error: BaseException | None) -> str:
        planned = planned_in_all(self.config)
        try:
            reason, why = events.how(self.run_dir, code, why, planned)
        except DamagedFile:  # the damaged file is the reason of the refusal
            reason = events.REASONS[code]
        if reason is Reason.NOTHING_LEFT:
            begun = [one.get("job_name") for one in self.store.unfinished().values()]
            if str(self.run_dir) not in begun:  # no start was killed
                return ""
        if not self.exp_id:
            self._begin()
        from verl_credit.cli.train.trial_numbers import held_out_metric, of_steps, read_steps

        run = read_steps(self.run_dir)
        metric, steps = held_out_metric(self.config, run), of_steps(run, self.steps_before)
        label = LABELS.get(reason)
        if isinstance(error, Terminated):
            label = FailureLabel.TRAIN_BUDGET_OVERRUN
        elif isinstance(error, TooLargeError):
            label = FailureLabel.SIZE_BLOCKED
        trial = self.store.append(
            partial(self._row, label, metric, steps, planned, why),
            {
                **self.facts,
                "exit_code": int(code),
                "reason": str(reason),
                "metric": metric._asdict(),
                "index_fingerprint": OmegaConf.select(self.config, "search.index_fingerprint"),
                **{name: value for name, value in steps.items() if name != "train_s"},
            },
        )
        result = metric.why if metric.value is None else f"{metric.name} {metric.value:.6g}"
        return one_line(f"trial {trial.label}: {trial.status}, {result}; {self.store.path}")

    def _row(
        self,
        label: FailureLabel | None,
        metric: Metric,
        steps: dict[str, Any],
        planned: int | None,
        why: str,
        trials: tuple[Trial, ...],
    ) -> Trial:
        """Builds the row. The store calls this under its lock, so no other trial ends meanwhile."""
        config, algorithm = self.config.lineage, self.config.algorithm
        turns = "info_gain_norm_mode" if algorithm.adv_estimator == ADV_ESTIMATOR else "adv_estimator"
        rule = {"threshold": config.threshold, "lower_is_better": config.lower_is_better}
        judged = verdict(metric.value, trials, **rule)
        expected = config.expected_delta
        snapshot = self.run_dir / CONFIG
        return Trial(
            exp_id=self.exp_id,
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
            train_s=steps["train_s"],
            total_s=time.time() - self.started,
            job_name=str(self.run_dir),
            snapshot_path=str(snapshot) if snapshot.exists() else "",
            notes=notes(self.config, steps, planned, why or (metric.why or judged.why)),
        )


def notes(config: DictConfig, steps: dict[str, Any], planned: int | None, why: str) -> str:
    """Writes the last column: alpha, gamma, clip scale, steps, and the reason for the status."""
    algorithm = config.algorithm
    scale = [steps[f"clip_scale_{one}"] for one in ("mean", "std")]
    scales = " ".join("—" if one is None else f"{one:.4g}" for one in scale)
    done = f"{steps['steps']}" + (f" of {planned}" if planned else "")
    text = f"alpha={algorithm.adv_rescale_alpha:g} gamma={algorithm.gamma:g} clip scale mean and std {scales}, {done} steps"
    return redact(f"{text}; {one_line(why)[:1000]}" if why else text)
