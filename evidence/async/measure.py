"""The three trainers on the lab: step time, held-out EM per minute, the time in which both cores work, the rollouts' ages.

    python evidence/async/measure.py --dir DIR [--seeds 1 2 3] [--modes credit credit_separate_async] [-- OVERRIDES]
    python evidence/async/measure.py --dir DIR --delay 0.5      with a search that answers after half a second
    python evidence/async/measure.py --dir DIR --read
    python evidence/async/measure.py --logged FILE      the figures of a GPU run: FILE is build/evidence/async/h100/MODE.json

One run after the other, `verl-credit train --config-name lab` with an evaluation every ten steps, in DIR/MODE-SEED. Runs
that are done are left out the next time; one that was cut off is put aside and made again from its beginning, because a
resumed one has other times; one that fails does not keep the others from being made. While a run goes on, the use of every
core is noted once a second. Overrides go to every run; runs with others, or another delay, need a folder of their own.
Writes DIR/measured.json and prints the tables of `comparison.py`; `--read` runs nothing.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

import psutil
from comparison import tables

from verl_credit.names import TRAINING_MODES
from verl_credit.recipe.compose import load_config
from verl_credit.records.run.files import METRICS, VALIDATION, read_json_lines

STEPS, WARM = 30, 5
"""Steps of a run, and how many of them are left out of its step time."""
BUSY = 50.0
"""A core that is used more than this many percent of a second works in it."""
SAMPLES = "cores.json"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--dir", type=Path)
    which.add_argument("--logged", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--modes", nargs="+", choices=TRAINING_MODES, default=list(TRAINING_MODES))
    parser.add_argument("--read", action="store_true", help="only read the runs of DIR")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds before every answer of the search")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    if options.logged:
        print(json.dumps(logged(json.loads(options.logged.read_text())), indent=1))
        return
    options.dir.mkdir(parents=True, exist_ok=True)
    failed = [] if options.read else make_runs(options)
    runs = {path.parent.name: read(path.parent) for path in sorted(options.dir.glob(f"*/{SAMPLES}"))}
    (options.dir / "measured.json").write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    if runs:
        print(tables(runs))
    if failed:
        raise SystemExit("\n".join(failed))


def make_runs(options: argparse.Namespace) -> list[str]:
    """Those that are missing; why some of them failed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what it started ends with it
    failed = []
    with searched(options.dir, options.delay, options.overrides) as search:
        for seed in options.seeds:
            for mode in options.modes:
                run_dir = options.dir.resolve() / f"{mode}-{seed}"
                if (run_dir / SAMPLES).exists():
                    continue
                if run_dir.exists():
                    run_dir.rename(run_dir.with_name(f"{run_dir.name}.cut-off-{int(time.time())}"))
                if code := train(run_dir, mode, seed, [*search, *options.overrides]):
                    failed.append(f"{run_dir}: exit code {code}; {run_dir / 'output.txt'} says why")
                    print(failed[-1], file=sys.stderr, flush=True)
    return failed


@contextmanager
def searched(folder: Path, delay: float, overrides: Sequence[str]) -> Iterator[list[str]]:
    """Overrides for a search that answers after ``delay`` seconds; none for the lab's own."""
    if not delay:
        yield []
        return
    from verl_credit.worlds.lab.build import build_lab

    lab = load_config("lab", overrides).lab
    build_lab(Path(lab.dir), world_seed=lab.world_seed, size=lab.size)
    port_file = folder.resolve() / "port"
    port_file.unlink(missing_ok=True)
    script = Path(__file__).with_name("slow_search.py")
    command = [sys.executable, str(script), "--lab", lab.dir, "--seconds", str(delay)]
    with ended_with_this([*command, "--port-file", str(port_file)]) as server:
        while not port_file.exists():
            if server.poll() is not None:
                raise SystemExit(f"the slow search ended with {server.returncode}")
            time.sleep(0.2)
        yield [f"search.url=http://127.0.0.1:{port_file.read_text()}"]


@contextmanager
def ended_with_this(command: list[str], **options) -> Iterator[subprocess.Popen]:
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()


def train(run_dir: Path, mode: str, seed: int, overrides: list[str]) -> int:
    """One run; 0, or the exit code of one that failed. The cores' use is written last: its file says the run is done."""
    command = [
        *(sys.executable, "-W", "ignore", "-m", "verl_credit.cli", "train", "--config-name", "lab"),
        *(f"run_dir={run_dir}", f"trainer.v1.trainer_mode={mode}", f"seed={seed}"),
        *(f"trainer.total_training_steps={STEPS}", "trainer.test_freq=10", *overrides),
    ]
    run_dir.mkdir(parents=True)
    samples = []
    with (
        open(run_dir / "output.txt", "w", encoding="utf-8") as output,
        ended_with_this(command, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        while process.poll() is None:
            steps = len(read_json_lines(run_dir / METRICS))
            samples.append([round(time.time(), 1), steps, psutil.cpu_percent(interval=1, percpu=True)])
    if process.returncode == 0:
        (run_dir / SAMPLES).write_text(json.dumps(samples), encoding="utf-8")
    return process.returncode


def read(run_dir: Path) -> dict:
    """The figures of one run. Its minutes are those of its steps, without start and evaluations."""
    rows, samples = read_json_lines(run_dir / METRICS), json.loads((run_dir / SAMPLES).read_text())
    held_out = {row["step"]: row for row in read_json_lines(run_dir / VALIDATION)}
    score = next(key for key in held_out[0] if key.endswith("-greedy/em/mean@1"))
    warm = rows[WARM:]
    trained = [cores for _, steps, cores in samples if WARM <= steps < len(rows)]
    working = [sum(use > BUSY for use in cores) for cores in trained]
    ages = [row["credit/staleness/mean"] for row in warm if "credit/staleness/mean" in row]
    minutes = [0.0, *accumulate(row["perf/time_per_step"] / 60 for row in rows)]
    return {
        "steps": len(rows),
        "step_s": statistics.median(row["perf/time_per_step"] for row in warm),
        "generation_s": statistics.median(row["timing_s/gen"] for row in warm),
        "minutes_of_steps": minutes[-1],
        "em": {step: row[score] for step, row in held_out.items()},
        "em_at_minute": {step: minutes[step] for step in held_out},
        "both_cores": sum(number >= 2 for number in working) / len(working),
        "cores_used": statistics.mean(sum(cores) for cores in trained) / 100,
        "age": statistics.mean(ages) if ages else 0.0,
        "oldest": max((row.get("credit/staleness/oldest", 0.0) for row in rows), default=0.0),
        "clipped": statistics.mean(row["actor/pg_clipfrac"] for row in warm),
    }


def logged(run: dict) -> dict:
    """Medians of the steps after the first five for seconds, of all steps for ratios; means of all steps for the rest."""
    rows = run["steps"]

    def all_of(name: str, among=rows) -> list[float]:
        return [row[name] for row in among if name in row]

    seconds = {
        name: statistics.median(all_of(name, rows[WARM:])) for name in ("perf/time_per_step", "timing_s/gen")
    }
    ratios = [f"credit/staleness/ratio_off_at_age_{age}" for age in (0, 1)]
    means = [f"credit/staleness/{name}" for name in ("mean", "turns_of_two_versions")]
    means += ["actor/pg_clipfrac", "training/rollout_probs_diff_max"]
    return {
        **seconds,
        **{name: statistics.median(all_of(name)) for name in ratios if all_of(name)},
        **{name: statistics.mean(all_of(name)) for name in means if all_of(name)},
        "oldest": max(all_of("credit/staleness/oldest"), default=0.0),
        "held_out": run["held_out"],
    }


if __name__ == "__main__":
    main()
