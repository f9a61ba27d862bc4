"""A run of the tiny lab that is killed at a chosen point, the same command again, and what must hold afterwards."""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as parquet
from omegaconf import OmegaConf

from kit.train_run import TrainRun
from verl_credit.errors import ExitCode
from verl_credit.records.run.files import METRICS, VALIDATION, read_json_lines
from verl_credit.records.run.table_files import TURNS, read_table, table_path
from verl_credit.turns.step.staleness import NAME as STALENESS

PLANTED = Path(__file__).with_name("planted")
STEPS, SAVED = 4, 2  # every SAVED steps: a checkpoint and an evaluation
SETTINGS = (
    "--config-name",
    "lab",
    "lab.size=tiny",
    f"trainer.total_training_steps={STEPS}",
    f"trainer.save_freq={SAVED}",
    "trainer.max_actor_ckpt_to_keep=1",
    f"trainer.test_freq={SAVED}",
    "data.val_max_samples=8",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "algorithm.info_gain_norm_mode=turn-group-v1d",
    "algorithm.info_gain_warmup_steps=1",
    "algorithm.transform_mode=gtpo",
)
# They say how fast and how full the machine was, or compare with a step of the same process (sync), or are the rounding of
# the engine's log-probs, which depends on what is answered together.
NOT_COMPARED = re.compile(
    r"timing|perf/|/mfu|credit/sync/|seconds|rollout_corr/|rollout_probs_diff|rollout_actor_probs"
)
AGES, SAME_WEIGHTS = f"{STALENESS}/", 1e-4
MARK = "VERL_CREDIT_RUN_MARK"  # in the environment of every process of a run, however it is orphaned


@dataclass(frozen=True)
class KillPoint:
    """``do``: SIGKILL, SIGTERM, full_disk, fail or cut_file; ``who`` gets the signal: command, self, or a title."""

    phase: str
    at: str
    do: str = "SIGKILL"
    who: str = "command"
    call: int = 1

    @property
    def name(self) -> str:
        who = "" if self.do in ("full_disk", "cut_file") else f" {self.who.removeprefix('ray::')}"
        return f"{self.phase}: {self.do}{who}, call {self.call} of {self.at.rpartition(':')[2]}"


TRAINER = "verl_credit.host.step.trainer:CreditTrainer"
RECORDED = "verl_credit.host.step.recorded"
AGENT = "verl_credit.host.rollout.agent_loop:TurnAgentLoop.run"
LOADER = "torchdata.stateful_dataloader.stateful_dataloader:StatefulDataLoader.state_dict"
# fmt: off
KILL_POINTS = (
    KillPoint("start", "verl_credit.host.process.launch:_tell_all_nodes"),
    KillPoint("start", f"{TRAINER}._setup", "SIGTERM"),
    KillPoint("start", f"{TRAINER}._check_workers", who="ray::WorkerDict"),
    KillPoint("rollout", AGENT, call=3),
    KillPoint("rollout", AGENT, "SIGTERM", call=5),
    KillPoint("rollout", AGENT, who="self", call=7),
    KillPoint("rollout", AGENT, who="ray::HFServer", call=9),
    KillPoint("rollout", AGENT, who="verl_credit_retriever", call=11),
    KillPoint("rollout", AGENT, who="raylet", call=13),
    KillPoint("scoring", f"{TRAINER}._compute_old_log_prob", call=3),
    KillPoint("scoring", f"{TRAINER}._compute_old_log_prob", who="ray::WorkerDict", call=2),
    KillPoint("scoring", f"{TRAINER}._compute_advantage", who="ray::CreditTaskRunner", call=3),
    KillPoint("update", "verl_credit.host.actor.policy_loss:ppo_loss", who="self", call=3),
    KillPoint("update", f"{TRAINER}._update_actor", "SIGTERM", call=4),
    KillPoint("update", f"{RECORDED}:append_json", "full_disk", call=3),
    KillPoint("saving", f"{RECORDED}:save_state", call=2),
    KillPoint("saving", "torch:save", "cut_file", "self", call=5),
    KillPoint("saving", "torch:save", "full_disk", call=4),
    KillPoint("saving", LOADER, who="self", call=2),  # the weights are whole, data.pt and the tracker are not written
    KillPoint("saving", f"{RECORDED}:delete_old", who="self", call=2),
    KillPoint("evaluation", f"{TRAINER}._validate", call=2),
    KillPoint("evaluation", f"{TRAINER}._validate", "SIGTERM", call=3),
    KillPoint("evaluation", f"{TRAINER}._validate", who="verl_credit_retriever", call=2),
    KillPoint("report", "verl_credit.records.report.write:write_report"),
)
STEP = "verl_credit.host.step.trainer:CreditSteps"
# fmt: on


@dataclass
class Outcome:
    """Of a killed run and of the same command again. ``lost`` is empty when all is well."""

    first: int
    second: int
    said: str
    resumed_from: int
    seconds_to_the_last_process: float
    largest_difference: float = 0.0
    lost: list[str] = field(default_factory=list)


def run_straight(folder: Path, lab: Path, *settings: str) -> Path:
    """The run that nothing disturbs; returns its folder."""
    run = started(folder, lab, *settings)
    assert run.wait() == 0, run.output
    return folder / "run"


def run_killed(folder: Path, lab: Path, point: KillPoint, straight: Path | None, *settings: str) -> Outcome:
    """``straight``: the run that all metrics are compared with; None: not at all. ``settings``: of both starts."""
    folder.mkdir(parents=True)
    fired, mark = folder / "fired", secrets.token_hex(8)
    run = started(folder, lab, *settings, **planted(point, fired), **{MARK: mark})
    first, lost = run.wait(), []
    if not fired.exists():
        lost.append("the fault did not happen")
    if point.do == "SIGTERM" and first != ExitCode.INTERRUPTED:
        lost.append(f"after SIGTERM the exit code is {first}")
    waited, left = wait_for_all(mark)
    lost += [f"a process is left: {name}" for name in left]
    before = read_json_lines(folder / "run" / METRICS)
    again = started(folder, lab, *settings, log="second.log")
    second, goes_on_from = again.wait(), resumed_from(again.output)
    if second not in (0, 3):
        lost.append(f"the same command again ended with {second}: {again.output[-2000:]}")
    lost += damaged(folder / "run") + rows_of(folder / "lineage")
    if not (folder / "run" / "report.html").exists():
        lost.append("there is no report")
    kept = read_json_lines(folder / "run" / METRICS)
    lost += [
        f"step {row['step']} is not as it was recorded"
        for row in before
        if row["step"] <= goes_on_from and row not in kept
    ]
    steps = [row["step"] for row in kept]
    if steps != list(range(1, STEPS + 1)):
        lost.append(f"steps in {METRICS}: {steps}")
    worst, apart = differences(straight, folder / "run") if straight else (0.0, [])
    return Outcome(first, second, said_of_the_end(run.output), goes_on_from, waited, worst, lost + apart)


def planted(point: KillPoint, fired: Path) -> dict[str, str]:
    """The environment of a run in which the fault happens; it makes the file ``fired``."""
    return {
        "PYTHONPATH": f"{PLANTED}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "VERL_CREDIT_PLANTED": json.dumps({**vars(point), "fired": str(fired)}),
    }


def started(folder: Path, lab: Path, *settings: str, log: str = "first.log", **environment: str) -> TrainRun:
    folder.mkdir(parents=True, exist_ok=True)
    own = (f"lab.dir={lab}", f"run_dir={folder / 'run'}", f"lineage.dir={folder / 'lineage'}")
    return TrainRun(folder / log, *SETTINGS, *settings, *own, environment=environment, seconds=1200)


def wait_for_all(mark: str, seconds: float = 60.0) -> tuple[float, list[str]]:
    """How long processes of the run lived on, and those that still do."""
    begun = time.monotonic()
    _, alive = psutil.wait_procs(list(marked(mark)), timeout=seconds)
    return time.monotonic() - begun, [name_of(process) for process in alive]


def marked(mark: str):
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def name_of(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline()[:4])
    return str(process.pid)


def said_of_the_end(output: str) -> str:
    """Why the run ended, or the last step that it told of."""
    lines = output.splitlines()
    ends = [line for line in lines if "steps done" in line or line.startswith("interrupted")]
    return (ends or [line for line in lines if "  step " in line] or [""])[-1][:300]


def resumed_from(output: str) -> int:
    """The step; 0: from the start."""
    said = re.search(r"resume: (?:exact, )?from step (\d+)", output)
    return int(said[1]) if said else 0


def damaged(run_dir: Path) -> list[str]:
    """Files that cannot be read, or are remains of writing."""
    found = [f"a remainder: {path.name}" for end in ("partial", "tmp") for path in run_dir.rglob(f"*.{end}")]
    readers = {
        ".jsonl": read_json_lines,
        ".json": lambda path: json.loads(path.read_text()),
        ".parquet": parquet.read_table,
        ".yaml": OmegaConf.load,
        ".html": lambda path: path.read_text().rstrip().endswith("</html>") or 1 / 0,
    }
    for path in sorted(run_dir.rglob("*")):
        if path.is_file() and (read := readers.get(path.suffix)):
            try:
                read(path)
            except Exception as error:
                found.append(f"{path.relative_to(run_dir)}: {error}")
    return found


def rows_of(lineage: Path) -> list[str]:
    """The table of trials ends with a row that is finished."""
    from verl_credit.records.lineage import LineageStore

    store = LineageStore(lineage, lower_is_better=False)
    states = [str(trial.status) for trial in store.all_trials()]
    return [] if states[-1:] in (["baseline"], ["keep"], ["discard"]) else [f"trials: {states}"]


def differences(straight: Path, run_dir: Path, tolerance: float = 1e-5) -> tuple[float, list[str]]:
    """(The largest difference of a metric, what is missing or differs by more than ``tolerance``)."""
    found, worst = [], 0.0
    for file in (METRICS, VALIDATION):
        expected, made = ([row["step"] for row in read_json_lines(at / file)] for at in (straight, run_dir))
        if sorted(expected) != made:
            found.append(f"{file}: steps {sorted(made)}, expected {sorted(expected)}")
    for file, step, name, value, other in compared(straight, run_dir):
        apart = distance(value, other)
        worst = max(worst, 0.0 if apart == float("inf") else apart)
        if apart > tolerance:
            found.append(f"{file} step {step}: {name} is {other}, expected {value}")
    return worst, found


def compared(straight: Path, run_dir: Path) -> Iterator[tuple[str, int, str, float, Any]]:
    """(file, step, metric, its value, that of the other run) of every step that both have."""
    for file in (METRICS, VALIDATION):
        expected, made = (
            {row["step"]: row for row in read_json_lines(at / file)} for at in (straight, run_dir)
        )
        for step in sorted(expected.keys() & made.keys()):
            for name, value in expected[step].items():
                if isinstance(value, int | float) and not NOT_COMPARED.search(name):
                    yield file, step, name, value, made[step].get(name)


def distance(value: float, other: Any) -> float:
    """Relative to the value where that is above .1; infinite where there is no other."""
    return abs(other - value) / max(abs(value), 0.1) if isinstance(other, int | float) else float("inf")


def wrong_ages(run_dir: Path) -> list[str]:
    """What contradicts that every rollout was made by the weights that its record names, and trained on in one step.

    Tokens that the weights of the step wrote have the log-probs of these weights. A draw of a prompt, which is what an id
    names, stands in the tables of one step; whether the same question was drawn twice, the tables do not say.
    """
    found, uids, compared_steps = [], {}, 0
    for row in read_json_lines(run_dir / METRICS):
        step, ages = row["step"], {n[len(AGES) :]: v for n, v in row.items() if n.startswith(AGES)}
        if ages["turns_unknown"] or not 0 <= ages["mean"] <= ages["oldest"] <= step - 1:
            found.append(f"step {step}: {ages}")
        if (off := ages.get("ratio_off_at_age_0")) is not None:
            compared_steps += 1
            if off > SAME_WEIGHTS:
                found.append(f"step {step}: rollouts of its own weights are off by {off}")
        for uid in set(read_table(table_path(run_dir, TURNS, step)).columns["uid"]):
            if uid in uids:
                found.append(f"draw {uid} was trained on in steps {uids[uid]} and {step}")
            uids[uid] = step
    return found if compared_steps else [*found, "no step has tokens of its own weights: none were compared"]
