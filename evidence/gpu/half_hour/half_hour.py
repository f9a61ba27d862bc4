"""Runs the queue within the minutes that are left, and keeps the table and the runs' files up to date in the folder."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from gpu import children, record
from gpu.half_hour import checks, phases, rows, table
from gpu.half_hour.order import FIRST_STEP_S, QUEUE, Run, overrides
from gpu.half_hour.table import CUT, DONE, FAILED, NOT_RUN, RUNNING, WAITING
from gpu.machine import environment

CLI = (sys.executable, "-W", "ignore", "-m", "verl_credit.cli")
METRICS, EVENTS, SAMPLES = "metrics.jsonl", "events.jsonl", "device_memory.jsonl"
FOLDER = "verl_credit_half_hour"
WEIGHTS_GIB = 13  # of both models, in bf16, and the world
PREPARE_S = 240
LONGEST_FILE = 2**24  # of what is copied; checkpoints and tables of rollouts are longer


@dataclass
class HalfHour:
    """``world`` names a module with the functions of `gpu.half_hour.world`; ``command`` stands for `verl-credit`."""

    record: record.Record
    out: Path
    work: Path
    device: str
    tiny: bool
    hardware: str
    minutes: float
    facts: Mapping
    world: str = "gpu.half_hour.world"
    queue: Sequence[Run] = QUEUE
    command: Sequence[str] = CLI
    memory: Path = Path("/dev/shm")
    limit_s: float = FIRST_STEP_S
    every_s: float = 10
    grace_s: float = children.GRACE_S
    begun: float = field(default_factory=time.monotonic)
    engine: str = ""
    lacking: str = ""
    """Why no run can begin."""
    folders: dict[str, Path] = field(default_factory=dict)
    _kept: float = float("-inf")

    def run(self) -> bool:
        """Whether every run is done and no row is off. What is done in the folder is not run again."""
        content = self.record.content
        self.states = content.setdefault("runs", {})
        for run in self.queue:
            if self.states.get(run.name, {}).get("state") != DONE:
                self.states[run.name] = {"state": WAITING, "recipe": run.recipe, "estimate_s": run.seconds}
        content.update(pid=os.getpid(), state=RUNNING)
        try:
            self.keep()
            self._prepare()
            serving = nullcontext("") if self.lacking else self._module.served(self.root)
            with serving as url:
                for run in self.queue:
                    if self.states[run.name]["state"] != DONE:
                        self._guarded(run, self.states[run.name], url)
            content["state"] = DONE
        finally:
            shutil.rmtree(self.memory / FOLDER, ignore_errors=True)
            for state in self.states.values():
                if state["state"] in (WAITING, RUNNING):
                    state.update(
                        state=CUT if state["state"] == RUNNING else NOT_RUN, why="the driver was ended"
                    )
                    content["state"] = CUT
            self.keep()
        good = all(row["verdict"] != record.OFF for row in content["rows"])
        return good and all(state["state"] == DONE for state in self.states.values())

    def keep(self, run: Run | None = None) -> None:
        """Write the table, and copy what the run has written. A full disk or a file that is gone ends no run."""
        self._kept = time.monotonic()
        with suppress(OSError):
            record.write(self.record.path, self.record.content)
            table.write(self.out, self.record.content)
        for path in self._run_dir(run).glob("*.json*") if run else ():
            with suppress(OSError):
                if path.stat().st_size <= LONGEST_FILE:
                    shutil.copy2(path, self._out(run) / path.name)

    def child(self, name: str, command: Sequence[str], limit_s: float) -> children.Ended:
        """A command of the preparation, with a limit; what it prints goes to the folder."""

        def late(taken: float) -> str:
            return self._over() or (f"cut after {limit_s:g} s" if taken > limit_s else "")

        return self._child(self.out / f"{name}.txt", command, late, self.tick)

    def tick(self, run: Run | None = None) -> None:
        if time.monotonic() - self._kept >= self.every_s:
            self.keep(run)

    def _child(self, output: Path, command: Sequence[str], late, tick) -> children.Ended:
        threads = {"OMP_NUM_THREADS": "1"} if self.device == "cpu" else {}
        return children.run(command, output, environment() | threads, late, tick, self.grace_s)

    # --- before the queue ---

    def _prepare(self) -> None:
        fits = not self.tiny and checks.room(self.memory) >= WEIGHTS_GIB
        self.root = self.memory / FOLDER if fits else self.work
        checks.machine(self.record, self.facts, self.device, self.work, self.memory)
        if self.device == "cuda" and not self.facts["gpus"]:
            self.lacking = checks.no_gpu(self.facts)
            return
        checks.measure_ceilings(self.record, self.child, self.device, self.tiny)
        made = self._of_world("prepare", f"world.prepare(Path({str(self.root)!r}), tiny={self.tiny})")
        if made.code != 0:
            self.lacking = f"the world was not made: {made.why}"
            self.record.off("world", made.why)
            return
        for model in ["tiny"] if self.tiny else dict.fromkeys(run.model for run in self.queue):
            what = f"print(world.weights(Path({str(self.root)!r}), {model!r}, {self.device!r}))"
            made = self._of_world(f"weights-{model}", what)
            if made.code == 0:
                self.folders[model] = Path(made.lines[-1])
                self.record.add(f"weights of {model}", {"seconds": made.seconds})
            else:
                self.record.off(f"weights of {model}", made.why)
        smallest = self.folders.get("qwen3-1.7b") or next(iter(self.folders.values()), None)
        self.engine = checks.engine(self.record, self.child, self.facts, self.device, smallest)

    def _of_world(self, name: str, what: str) -> children.Ended:
        code = f"import importlib; from pathlib import Path; world = importlib.import_module({self.world!r}); {what}"
        return self.child(name, [sys.executable, "-W", "ignore", "-c", code], PREPARE_S)

    @property
    def _module(self):
        return importlib.import_module(self.world)

    # --- a run ---

    def _guarded(self, run: Run, state: dict, url: str) -> None:
        """What goes wrong in a run, the driver's own part in it too, ends no other."""
        try:
            self._one(run, state, url)
        except Exception as error:
            state.update(state=FAILED, why=f"the driver: {type(error).__name__}: {error}")
        self.keep()

    def _one(self, run: Run, state: dict, url: str) -> None:
        if why := self._cannot(run):
            self._not_run(run, state, why)
            return
        model = self.folders["tiny" if self.tiny else run.model]
        given = overrides(run, tiny=self.tiny, engine=self.engine, hardware=self.hardware)
        given += [*self._module.overrides(self.root, url, model, run.recipe), f"run_dir={self._run_dir(run)}"]
        self._out(run).mkdir(parents=True, exist_ok=True)
        planned = self._plan(run, given)
        remedies = [] if planned.get("fits", True) else [one for one in planned["remedies"] if " " not in one]
        if remedies:
            planned = self._plan(run, given := [*given, *remedies])
        if "error" in planned:
            state.update(state=FAILED, why=planned["error"])
            self.record.off(f"{run.name}: run", planned["error"])
        elif not planned["fits"]:
            self._not_run(run, state, f"it does not fit by the plan: {_worst(planned)}")
        elif (need := planned["run"]["checkpoint_disk_bytes"] / checks.GIB) > checks.room(self.work):
            self._not_run(run, state, f"its checkpoints need {need:.1f} GiB below {self.work}")
        else:
            state.update(engine=self.engine, remedies=" ".join(remedies))
            self._train(run, state, given, planned)

    def _cannot(self, run: Run) -> str:
        if self.lacking:
            return self.lacking
        if not self.tiny and run.model not in self.folders:
            return f"there are no weights of {run.model}"
        if run.resumes and not list(self._run_dir(run).glob("checkpoints/global_step_*")):
            return f"{run.resumes} left no checkpoint"
        if self.left_s() < run.first_step_s:
            return f"{self.left_s():.0f} s are left, its first step takes {run.first_step_s}"
        return ""

    def left_s(self) -> float:
        return 60 * self.minutes - (time.monotonic() - self.begun)

    def _over(self) -> str:
        return f"the {self.minutes:g} minutes are over" if self.left_s() <= 0 else ""

    def _not_run(self, run: Run, state: dict, why: str) -> None:
        state.update(state=NOT_RUN, why=why)
        self.record.not_run(f"{run.name}: run", why)

    def _plan(self, run: Run, given: Sequence[str]) -> dict:
        """`verl-credit plan --json`, on the memory that this machine has; {"error": why} where it cannot plan."""
        plan = ["plan", "--config-name", run.recipe, "--json", *given, *checks.hardware(self.facts)]
        ended = self.child(f"{run.name}/plan", [*self.command, *plan], PREPARE_S)
        text = (self._out(run) / "plan.txt").read_text(errors="replace")
        try:
            return json.loads(text[text.index("{") :])
        except ValueError:
            return {"error": f"plan: {ended.why or text[-300:]}"}

    def _train(self, run: Run, state: dict, given: Sequence[str], planned: dict) -> None:
        run_dir = self._run_dir(run)
        if not run.resumes:
            shutil.rmtree(run_dir, ignore_errors=True)
        before = len(_lines(run_dir / METRICS))
        state.update(state=RUNNING, started_s=round(time.monotonic() - self.begun, 1), before=before)
        seen = {"steps": before, "at": 0.0, "now": 0.0}

        def late(taken: float) -> str:
            seen["now"] = taken
            if why := self._over():
                return why
            return f"no new step for {self.limit_s:g} s" if taken - seen["at"] > self.limit_s else ""

        def tick() -> None:
            steps = len(_lines(run_dir / METRICS))
            state["steps"] = f"{steps - before} of {run.steps - before}"
            if steps > seen["steps"]:
                seen.update(steps=steps, at=seen["now"])
                state.setdefault("first_step_s", round(seen["at"], 1))
                self._measure(run, state, planned)
                self.keep(run)
            self.tick(run)

        train = [*self.command, "train", "--config-name", run.recipe, *given]
        with phases.sample(self._out(run) / SAMPLES):
            ended = self._child(self._out(run) / "stdout.txt", train, late, tick)
        tick()
        reached = len(_lines(run_dir / METRICS)) == run.steps
        state["state"] = CUT if ended.code is None else DONE if reached and ended.code == 0 else FAILED
        state["seconds"] = ended.seconds
        if ended.why:
            state["why"] = ended.why
        if metrics := _lines(run_dir / METRICS):
            lengths = [
                f"plan.mean_{part}_tokens={metrics[-1][f'{part}_length/mean']:.0f}"
                for part in ("prompt", "response")
                if f"{part}_length/mean" in metrics[-1]
            ]
            measured = self._plan(run, [*given, *lengths])
            planned = planned if "error" in measured else measured
        self._measure(run, state, planned)
        self.keep(run)

    def _measure(self, run: Run, state: dict, planned: Mapping) -> None:
        run_dir, samples = self._run_dir(run), self._out(run) / SAMPLES
        resumed = [row["text"] for row in _lines(run_dir / EVENTS) if row.get("kind") == "resume"]
        try:
            numbers = rows.measure(
                self.record, run, state | {"resume": next(iter(resumed[-1:]), None)}, _lines(run_dir / METRICS), run_dir,
                planned, samples if samples.exists() else None, toy=self.tiny, ceiling=checks.tflops(self.record),
            )  # fmt: skip
        except Exception as error:  # a file that is not as expected ends no run
            self.record.off(f"{run.name}: reading its files", error)
        else:
            state["numbers"] = numbers

    def _run_dir(self, run: Run) -> Path:
        return self.work / "runs" / (run.resumes or run.name)

    def _out(self, run: Run) -> Path:
        return self.out / run.name


def _worst(plan: Mapping) -> str:
    phase = max((p for p in plan["phases"] if not p["fits"]), key=lambda p: p["total"] - p["capacity"])
    problems = f", {phase['problems'][0]}" if phase["problems"] else ""
    return f"{phase['name']} {phase['total'] / checks.GIB:.1f} of {phase['capacity'] / checks.GIB:.1f} GiB{problems}"


def _lines(path: Path) -> list[dict]:
    """The complete lines of a file of JSON lines that is being written."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1] if line.strip()]
