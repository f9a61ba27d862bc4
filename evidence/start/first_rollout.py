"""From `verl-credit train` to the first rollouts, with the fork server and without, in turn.

    python evidence/start/first_rollout.py [--repetitions 3] [--cold] [FOLDER]

prints the table of README.md: medians of the seconds since the command, and of the CPU seconds of all of a run's processes
up to its first rollouts. The tiny lab is built in FOLDER (default: a temporary one) by a first run, which is not counted.
--cold empties the file cache before each run, which needs root.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

import psutil

from verl_credit.records.run.events import STAGE, START
from verl_credit.records.run.files import EVENTS, read_json_lines

PROGRAM = "import sys; from verl_credit.cli import main; sys.exit(main())"
OPTIONS = (
    "lab.size=tiny", "lab.world_seed=0", "lab.hops=null", "trainer.total_training_steps=1", "trainer.test_freq=-1",
    "trainer.save_freq=-1", "trainer.val_before_train=false", "data.train_batch_size=4", "data.val_max_samples=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=4",
)  # fmt: skip
LAST = "the first rollouts are finished"
CPU, SHARED = "CPU seconds of all processes", "memory of all processes (PSS) at the first rollouts, MiB"
FIRST = "the first event"


def measure(name: str, folder: Path, fork_workers: str, cold: bool) -> dict[str, float]:
    """Seconds since the command by stage, and the CPU seconds and memory until the first rollouts."""
    if cold:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
    places = [f"run_dir={folder / name}", f"lab.dir={folder / 'lab'}", f"lineage.dir={folder / 'lineage'}"]
    words = ["train", "--config-name", "lab", *places, *OPTIONS, f"fork_workers={fork_workers}"]
    cpu, began = {}, time.time()
    with (folder / f"{name}.log").open("wb") as log:
        run = subprocess.Popen([sys.executable, "-c", PROGRAM, *words], stdout=log, stderr=subprocess.STDOUT)
        root, found = psutil.Process(run.pid), {}
        while run.poll() is None and LAST not in found:
            found = stages(folder / name, began)
            for process in family(root):
                with suppress(psutil.Error):
                    used = process.cpu_times()
                    cpu[process.pid, process.create_time()] = used.user + used.system
            time.sleep(0.5)
        memory = sum(pss(process) for process in family(root))
        if run.wait() != 0 or LAST not in found:
            raise SystemExit((folder / f"{name}.log").read_text())
    found = {text: seconds for text, seconds in found.items() if seconds <= found[LAST]}
    return {**found, CPU: sum(cpu.values()), SHARED: memory / 2**20}


def family(root: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return [root, *root.children(recursive=True)]
    return []


def pss(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        return process.memory_full_info().pss
    return 0


def stages(run_dir: Path, began: float) -> dict[str, float]:
    rows = [row for row in read_json_lines(run_dir / EVENTS) if row["kind"] in (START, STAGE)]
    texts = {
        row["time"] - began: FIRST if row["kind"] == START else row["text"].split(" at http")[0]
        for row in rows
    }
    return {text: seconds for seconds, text in sorted(texts.items())}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--cold", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as own:
        folder = Path(given.folder or own).resolve()
        number = time.strftime("%H%M%S")
        measure(f"first-{number}", folder, "auto", cold=False)
        runs = {"false": [], "auto": []}
        for repetition in range(given.repetitions):
            for choice, done in runs.items():
                done.append(measure(f"{choice}-{number}-{repetition}", folder, choice, given.cold))
    print("| stage | fork_workers=false | fork_workers=auto | ratio |\n|---|---|---|---|")
    for text in runs["auto"][0]:
        before, now = (
            median(run[text] for run in done) if all(text in run for run in done) else None
            for done in runs.values()
        )
        ratio = f"{now / before:.2f} | " if before else "| "
        print(f"| {text} | {'' if before is None else f'{before:.1f}'} | {now:.1f} | {ratio}".rstrip())


if __name__ == "__main__":
    main()
