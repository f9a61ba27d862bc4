"""Three hundred steps of the tiny lab: do memory, open files, processes and threads grow, and do steps get slower?

    python evidence/reliability/long_run.py [--steps 300] [--again]
    python evidence/reliability/long_run.py --table      # the table alone, from long_run.json

A sample of every process of the run after each step. Reported per kind of process: the slope over the last two thirds of the
steps with its interval (least squares, 95 %), and what it comes to over the run; and the mean time of the last tenth of the
steps against that of the first. A run that was cut is gone on with, and its samples with it. A result that is there is not
measured again without --again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
from results import FOLDER, RUNS

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from kit.faults import SETTINGS
from kit.train_run import TrainRun
from verl_credit.records.run.files import METRICS, append_json, read_json_lines

RESULT, SAMPLES = FOLDER / "long_run.json", "samples.jsonl"
KINDS = ("memory_mb", "open_files", "threads")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, default=RUNS / "long")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--again", action="store_true", help="measure again, in a new --dir")
    parser.add_argument("--table", action="store_true", help="run nothing; print the table")
    asked = parser.parse_args()
    if not asked.table and (asked.again or not RESULT.exists()):
        folder = asked.dir.resolve()
        if asked.again and len(read_json_lines(folder / SAMPLES)) >= asked.steps:
            parser.error(f"--again: {folder} holds a finished run; delete it, or give another --dir")
        samples = train_and_sample(folder, asked.steps)
        result = summary(samples, step_times(folder / "run"))
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(table(json.loads(RESULT.read_text())))


def train_and_sample(folder: Path, steps: int) -> list[dict]:
    folder.mkdir(parents=True, exist_ok=True)
    run_dir, samples = folder / "run", folder / SAMPLES
    run = TrainRun(
        folder / "train.log", *SETTINGS, f"lab.dir={folder / 'lab'}", f"run_dir={run_dir}",
        f"trainer.total_training_steps={steps}", "trainer.save_freq=50", "trainer.test_freq=50",
        "trainer.max_actor_ckpt_to_keep=2", seconds=86_400,
    )  # fmt: skip
    seen = len(read_json_lines(samples))
    while run.process.poll() is None:
        time.sleep(0.2)
        done = len(read_json_lines(run_dir / METRICS))
        if done > seen:
            seen = done
            append_json(samples, {"step": done, "processes": sample(run.process.pid)})
    if run.process.returncode not in (0, 3):
        sys.exit(f"the run ended with {run.process.returncode}: see {run.log}")
    return read_json_lines(samples)


def sample(pid: int) -> list[dict]:
    """Of the command and of everything that it started."""
    command, found = psutil.Process(pid), []
    for process in (command, *command.children(recursive=True)):
        with suppress(psutil.Error):
            found.append(
                {
                    "kind": kind_of(process),
                    # what it alone holds: pages of shared memory would count once for every process
                    "memory_mb": process.memory_full_info().uss / 2**20,
                    "open_files": process.num_fds(),
                    "threads": process.num_threads(),
                }
            )
    return found


def kind_of(process: psutil.Process) -> str:
    """As it names itself; Ray's workers by their class, whatever they do just now."""
    words = process.cmdline() or [process.name()]
    if words[0].startswith("ray::"):
        return words[0].split(".")[0].split("(")[0]
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else words[0].rsplit("/", 1)[-1]
    return "ray's own Python processes" if "python" in module else module


def step_times(run_dir: Path) -> list[float]:
    return [row["timing_s/step"] for row in read_json_lines(run_dir / METRICS)]


def summary(samples: list[dict], seconds: list[float]) -> dict:
    tenth = max(1, len(seconds) // 10)
    curves: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    counts = []
    for row in samples:
        counted = Counter(process["kind"] for process in row["processes"])
        counts.append((row["step"], sum(counted.values())))
        for kind in counted:
            alike = [process for process in row["processes"] if process["kind"] == kind]
            for name in KINDS:
                curves[kind, name].append((row["step"], sum(process[name] for process in alike)))
    return {
        "steps": len(seconds),
        "step_s": {"first_tenth": np.mean(seconds[:tenth]), "last_tenth": np.mean(seconds[-tenth:])},
        "processes": slope(counts),
        "kinds": {
            kind: {name: slope(curves[kind, name]) for name in KINDS}
            for kind in sorted({kind for kind, _ in curves})
            if len(curves[kind, KINDS[0]]) > len(samples) // 2  # not those that came and went
        },
    }


def slope(curve: list[tuple[int, float]]) -> dict[str, float]:
    """Per 100 steps, over the last two thirds, with the half-width of its interval; and the values at both ends."""
    later = np.array(curve[len(curve) // 3 :], dtype=float)
    step, value = later[:, 0], later[:, 1]
    x = step - step.mean()
    found = (x @ value) / (x @ x)
    rest = value - value.mean() - found * x
    error = np.sqrt((rest @ rest) / max(len(x) - 2, 1) / (x @ x))
    return {
        "first": curve[0][1],
        "last": curve[-1][1],
        "per_100_steps": 100 * found,
        "half_width": 196 * error,
    }


def table(result: dict) -> str:
    first_s, last_s = result["step_s"].values()
    processes = result["processes"]
    lines = [
        f"{result['steps']} steps; a step took {first_s:.2f} s in the first tenth, {last_s:.2f} s in the last "
        f"({last_s / first_s:.2f} times); processes {processes['first']:.0f} to {processes['last']:.0f}.",
        "",
        "| process | memory at the end, MB | growth per 100 steps | open files at the end | growth | threads | growth |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, of in result["kinds"].items():
        cells = [
            f"{of[name]['last']:.0f} | {of[name]['per_100_steps']:+.2f} +- {of[name]['half_width']:.2f}"
            for name in KINDS
        ]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
