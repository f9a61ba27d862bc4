"""A queue of training runs on one GPU, in order of value: each has a time limit, and its results are copied when it ends.

    python evidence/gpu/half_hour/drive.py [--out FOLDER] [--work FOLDER] [--minutes 30] [--only R1,R3]
    python evidence/gpu/half_hour/drive.py --device cpu --tiny      the same at a size for two cores

FOLDER has half_hour.json, table.md, and per run what it printed, its plan, events, metrics and the device's memory. Called
again with the same folders, the command runs what is not done. Exit code 0: all runs are done and no row is off; 1:
otherwise; 4: a wrong command.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).resolve().parent
# `gpu` and `verl_credit`; not this folder, whose files have plain names
sys.path[:1] = [str(HERE.parents[1]), str(HERE.parents[2])]

from gpu import children, record, table  # noqa: E402
from gpu.half_hour import rows, world  # noqa: E402
from gpu.half_hour.order import HF, QUEUE, VLLM, Run, overrides  # noqa: E402
from gpu.machine import code_version, environment, here  # noqa: E402
from gpu.parts import TRAINING  # noqa: E402
from verl_credit.records.run.files import EVENTS, METRICS, append_json, read_json_lines  # noqa: E402

NAME, MINUTES, PREPARE_S, SMOKE_S = "half_hour", 30, 240, 150
CLI = (sys.executable, "-W", "ignore", "-m", "verl_credit.cli")
SAMPLES = "device_memory.jsonl"
MEMORY = Path("/dev/shm/verl_credit_half_hour")
WEIGHTS = 13 << 30  # of both models, in bf16, and the world
LONGEST_FILE = 2**24  # of what is copied; checkpoints and tables of rollouts are longer
RUNNING, DONE, CUT, FAILED, NOT_RUN = "running", "done", "cut", "failed", "not run"
PLANNED_FOR = {"H100": "h100", "H200": "h200", "H20": "h20", "A100": "a100", "GB10": "gb10"}
SMOKE = """
import sys
from vllm import LLM, SamplingParams
engine = LLM(sys.argv[1], dtype="bfloat16", max_model_len=512, gpu_memory_utilization=0.3, enforce_eager=True, seed=0)
found = engine.generate([{"prompt_token_ids": [1, 2, 3, 4]}], SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
assert len(found[0].outputs[0].token_ids) == 8, found
"""


@dataclass
class Queue:
    """``command`` stands for `verl-credit`; ``made`` are the functions of `gpu.half_hour.world`."""

    kept: record.Record
    out: Path
    work: Path
    device: str
    tiny: bool
    hardware: str
    facts: Mapping
    minutes: float = MINUTES
    command: Sequence[str] = CLI
    made: object = world
    grace_s: float = children.GRACE_S
    begun: float = field(default_factory=time.monotonic)

    def run(self, queue: Sequence[Run]) -> bool:
        """Returns whether every run is done and no row is off. What is done in the folder is not run again."""
        states = self.kept.content.setdefault("runs", {})
        for run in queue:
            if states.get(run.name, {}).get("state") != DONE:
                states[run.name] = {"state": NOT_RUN, "recipe": run.recipe}
        waiting = [run for run in queue if states[run.name]["state"] != DONE]
        fits = not self.tiny and shutil.disk_usage(MEMORY.parent).free > WEIGHTS
        root = MEMORY if fits else self.work
        self.kept.add(
            "machine", {name: self.facts[name] for name in ("device", "gpus", "memory_gib", "python")}
        )
        self._keep()
        if waiting and not (why := self._prepare(root, waiting)):
            with self.made.served(root) as url:
                for run in waiting:
                    self._one(run, states[run.name], root, url)
                    self._keep()
        elif waiting:
            self.kept.off("world", why)
            for run in waiting:
                states[run.name]["why"] = why
        self._keep()
        if done := all(states[run.name]["state"] == DONE for run in queue):
            shutil.rmtree(MEMORY, ignore_errors=True)
        return done and all(row["verdict"] != record.OFF for row in self.kept.content["rows"])

    def _prepare(self, root: Path, queue: Sequence[Run]) -> str:
        """Makes the world and the weights without holding the GPU; the device decides the engine. Returns why it cannot."""
        if self.device == "cuda" and not self.facts["gpus"]:
            return f"torch {self.facts['software'].get('torch')} sees no GPU: {self.facts['no_gpu']}"
        self.made.prepare(root, tiny=self.tiny)
        self.models = ["tiny"] if self.tiny else sorted({run.model for run in queue})
        for model in self.models:
            code = f"world.weights(Path({str(root)!r}), {model!r}, {self.device!r})"
            code = f"from pathlib import Path; from gpu.half_hour import world; {code}"
            ended = self._child(self.out / f"weights-{model}.txt", [sys.executable, "-c", code], PREPARE_S)
            if ended.why:
                return f"the weights of {model}: {ended.why}"
        self.engine = HF if self.device == "cpu" else VLLM
        if self.engine == VLLM:
            weights = self.made.weights(root, self.models[0], self.device)
            ended = self._child(self.out / "smoke.txt", [sys.executable, "-c", SMOKE, str(weights)], SMOKE_S)
            if ended.why:
                return f"vLLM writes no token: {ended.why}"
        return ""

    def _one(self, run: Run, state: dict, root: Path, url: str) -> None:
        run_dir, out = self.work / "runs" / (run.resumes or run.name), self.out / run.name
        left = 60 * self.minutes - (time.monotonic() - self.begun)
        if left < run.limit_s / 2:
            state["why"] = f"{left:.0f} s are left of {self.minutes:g} minutes, and it may take {run.limit_s}"
            return
        if not run.resumes:
            shutil.rmtree(run_dir, ignore_errors=True)
        elif not list(run_dir.glob("checkpoints/global_step_*")):
            state["why"] = f"{run.resumes} left no checkpoint"
            return
        before = len(read_json_lines(run_dir / METRICS))
        model = self.made.weights(root, "tiny" if self.tiny else run.model, self.device)
        given = overrides(run, tiny=self.tiny, engine=self.engine, hardware=self.hardware)
        given += [*self.made.overrides(root, url, model, run.recipe), f"run_dir={run_dir}"]
        state.update(state=RUNNING, engine=self.engine)
        self._keep()
        out.mkdir(parents=True, exist_ok=True)
        (out / SAMPLES).unlink(missing_ok=True)
        with sample(out / SAMPLES):
            train = [*self.command, "train", "--config-name", run.recipe, *given]
            ended = self._child(out / "stdout.txt", train, min(run.limit_s, left))
        steps = read_json_lines(run_dir / METRICS)
        done = ended.code == 0 and len(steps) == run.steps
        state.update(
            state=CUT if ended.code is None else DONE if done else FAILED,
            seconds=ended.seconds, steps=f"{len(steps) - before} of {run.steps - before}", why=ended.why,
        )  # fmt: skip
        for path in run_dir.glob("*.json*"):
            if path.stat().st_size <= LONGEST_FILE:
                shutil.copy2(path, out / path.name)
        try:
            plan = self._plan(run, given, steps)
            resumed = [
                event["text"] for event in read_json_lines(run_dir / EVENTS) if event["kind"] == "resume"
            ]
            state["numbers"] = rows.measure(
                self.kept, run, state | {"before": before, "resume": "".join(resumed[-1:])}, run_dir, plan,
                out / SAMPLES, toy=self.tiny,
            )  # fmt: skip
        except Exception as error:  # a file that is not as expected ends no other run
            self.kept.off(f"{run.name}: reading its files", error)

    def _plan(self, run: Run, given: Sequence[str], steps: Sequence[Mapping]) -> dict:
        """Returns what `verl-credit plan --json` says of this machine and of the rows that the run had."""
        command = [*self.command, "plan", "--config-name", run.recipe, "--json", *given]
        if steps:
            command += [
                f"plan.mean_{part}_tokens={steps[-1][f'{part}_length/mean']:.0f}"
                for part in ("prompt", "response")
            ]
        if self.facts["gpus"]:
            name = next(
                (ours for theirs, ours in PLANNED_FOR.items() if theirs in self.facts["device"]), "h100"
            )
            flash = str("flash-attn" in self.facts["software"]).lower()
            command += [f"hardware.name={name}", f"+hardware.memory_gib={self.facts['memory_gib']}"]
            command += [f"+hardware.flash_attn={flash}"]
        output = self.out / run.name / "plan.txt"
        self._child(output, command, PREPARE_S)
        text = output.read_text(errors="replace")
        return json.loads(text[text.index("{") :])

    def _child(self, output: Path, command: Sequence[str], limit_s: float) -> children.Ended:
        def late(taken: float) -> str:
            return f"cut after {limit_s:.0f} s" if taken > limit_s else ""

        threads = {"OMP_NUM_THREADS": "1"} if self.device == "cpu" else {}
        return children.run(command, output, environment() | threads, late, lambda: None, self.grace_s)

    def _keep(self) -> None:
        record.write(self.kept.path, self.kept.content)
        lines = [table.runs(self.kept.content), "", *map(record.line, self.kept.content["rows"]), ""]
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "table.md").write_text("\n".join(lines), encoding="utf-8")


@contextmanager
def sample(path: Path) -> Iterator[None]:
    """Writes the memory in use on every GPU to ``path``, twice a second; no file where nvidia-smi gives no number."""
    if shutil.which("nvidia-smi") is None:
        yield
        return
    query = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits", "-lms", "500"]
    process = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def listen():
        for line in process.stdout:
            gpu, _, mib = line.partition(", ")
            if mib.strip().isdigit():  # GB10 gives none
                append_json(path, {"time": time.time(), "gpu": int(gpu), "mib": int(mib)})

    reader = threading.Thread(target=listen, daemon=True)
    reader.start()
    try:
        yield
    finally:
        process.kill()
        process.wait()
        reader.join(5)


def run(setting, kept: record.Record) -> None:
    """Runs the queue as a part of `make gpu-evidence`. Raises RuntimeError where a run is not done."""
    children.adopt_orphans()
    hardware = "spark" if setting.hardware == "spark" else "h100x1"  # one GPU is enough, wherever it is
    work, facts = Path(setting.work).resolve(), here(setting.device)
    Queue(kept, work / NAME, work, setting.device, setting.tiny, hardware, facts).run(QUEUE)
    states = kept.content["runs"].items()
    if undone := [
        f"{name} {one['state']}: {one.get('why', '')}" for name, one in states if one["state"] != DONE
    ]:
        raise RuntimeError("; ".join(undone))


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    names = options.only.split(",") if options.only else [one.name for one in QUEUE]
    if unknown := set(names) - {one.name for one in QUEUE}:
        print(
            f"--only: {', '.join(sorted(unknown))}: expected {', '.join(one.name for one in QUEUE)}",
            file=sys.stderr,
        )
        return 4
    if options.device == "cpu" and not options.tiny:
        print("--device cpu needs --tiny: the full sizes take a CPU days", file=sys.stderr)
        return 4
    children.adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    out, facts = options.out.resolve(), here(options.device)
    kept = record.Record(out / f"{NAME}.json")
    kept.content |= {
        "part": NAME, "tiny": options.tiny, "hardware": options.hardware, "when": f"{datetime.now(UTC):%Y-%m-%d}",
        "version": code_version(TRAINING), "state": RUNNING, **facts,
    }  # fmt: skip
    queue = Queue(
        kept,
        out,
        options.work.resolve(),
        options.device,
        options.tiny,
        options.hardware,
        facts,
        options.minutes,
    )
    good = queue.run(
        sorted((one for one in QUEUE if one.name in names), key=lambda one: names.index(one.name))
    )
    kept.content["state"] = DONE if good else FAILED
    record.write(kept.path, kept.content)
    print((out / "table.md").read_text())
    return 0 if good else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes: the rehearsal")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/half_hour"), help="the table and what runs wrote"
    )
    parser.add_argument(
        "--work", type=Path, default=Path("runs/half_hour_work"), help="runs with their checkpoints"
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help="that are left; nothing runs longer")
    parser.add_argument(
        "--only", help="runs with commas between, in that order; default: all, in order of value"
    )
    parser.add_argument(
        "--hardware", choices=("h100x1", "spark"), default="h100x1", help="recipes/hardware of one GPU"
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
