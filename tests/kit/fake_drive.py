"""The driver of evidence/gpu/half_hour with a world of no weights and a command that stands for `verl-credit`.

python fake_drive.py SETTINGS      a driver; SETTINGS is JSON: out, facts, queue, behaviour, ...
python fake_drive.py plan|train .. the command
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

FOREVER = "import os; os.read(os.pipe()[0], 1)"
PHASES = ("rollout", "weight sync", "log-prob", "update: loss", "update: backward", "update: optimizer step")
GIB = 2**30


def prepare(root: Path, *, tiny: bool) -> None:
    if os.environ.get("NO_WORLD"):
        raise OSError("the disk is full")
    root.mkdir(parents=True, exist_ok=True)


def weights(root: Path, model: str, device: str) -> Path:
    return root / model


@contextmanager
def served(root: Path):
    yield "http://127.0.0.1:1"


def overrides(root: Path, url: str, folder: Path, recipe: str) -> list[str]:
    return [f"actor_rollout_ref.model.path={folder}"]


def plan(given: list[str], behaviour: dict) -> None:
    if behaviour.get("odd"):
        print(json.dumps({"fits": True}))
        return
    helped = behaviour.get("remedy") in given
    fits = helped or not behaviour.get("large")
    phase = {
        "where": "device",
        "capacity": 2 * GIB,
        "problems": [],
        "parts": {"weights": GIB},
        "live_bytes": GIB,
    }
    phase |= {"total": GIB if fits else 3 * GIB, "fits": fits}
    phases = [phase | {"name": name} for name in PHASES]
    remedy = behaviour.get("remedy", "x=1")
    print(json.dumps({
        "fits": fits, "phases": phases, "remedies": [] if fits else [remedy], "assumptions": {"mfu": 0.35},
        "hardware": {"peak_bf16": 1e15}, "run": {"checkpoint_disk_bytes": behaviour.get("disk", 0)},
        "step": {"seconds": {"decode": 1.0, "log-prob": 2.0, "update": 1.0}, "flops": {"update": 2e14}},
    }))  # fmt: skip


def train(given: list[str], behaviour: dict, run_dir: Path, steps: int) -> int:
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "argv").write_text("\n".join(given))
    (run_dir / "pid").write_text(str(os.getpid()))
    print("starting", flush=True)
    if behaviour.get("child"):  # in a session of its own, as some of Ray's helpers are
        child = subprocess.Popen([sys.executable, "-c", FOREVER], start_new_session=True)
        (run_dir / "child").write_text(str(child.pid))
    done = (
        len((run_dir / "metrics.jsonl").read_bytes().splitlines())
        if (run_dir / "metrics.jsonl").exists()
        else 0
    )
    if done:
        _append(
            run_dir / "events.jsonl",
            {"kind": "resume", "text": f"resume: exact, from step {done}", "time": time.time()},
        )
    for step in range(done + 1, behaviour.get("until", steps) + 1):
        gains = step % 2
        _append(run_dir / "metrics.jsonl", {
            "step": step, "timing_s/step": 10.0 + gains, "timing_s/old_log_prob": 2.0 + 0.2 * gains, "timing_s/gen": 1.0,
            "timing_s/update_actor": 1.0, "perf/mfu/actor": 0.3, "prompt_length/mean": 10, "response_length/mean": 20,
            "credit/gain/scored": gains, "rollout_corr/k3_kl": 0.001, **({
                "credit/gain/contexts_scored": 9, "credit/gain/std": 0.1, "credit/clip_scale/std": 0.2,
                "credit/gain/failed_rows": 0, "credit/gain/seconds": 0.3,
            } if gains else {}),
        })  # fmt: skip
    if "trainer.save_freq=2" in given:
        (run_dir / "checkpoints" / "global_step_2").mkdir(parents=True, exist_ok=True)
    if "dies" in behaviour:
        print(behaviour["dies"], flush=True)
        return 1
    if behaviour.get("hangs"):
        exec(FOREVER)
    return 0


def _append(path: Path, row: dict) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def command(arguments: list[str]) -> int:
    given = dict(one.split("=", 1) for one in arguments if "=" in one)
    run_dir = Path(given["run_dir"])
    behaviours = json.loads(os.environ["BEHAVIOUR"])
    behaviour = behaviours.get(
        f"{run_dir.name}:{given['trainer.total_training_steps']}", behaviours.get(run_dir.name, {})
    )
    if arguments[0] == "plan":
        plan(arguments, behaviour)
        return 0
    return train(arguments, behaviour, run_dir, int(given["trainer.total_training_steps"]))


def drive(settings: dict) -> int:
    from gpu.half_hour import checks, drive

    checks.measure_ceilings = lambda *given: None  # it imports torch
    checks.room = lambda path: settings.get("room", 2.0 * checks.LEAST_DISK_GIB)  # not that of this machine
    drive.here = lambda device: settings["facts"]
    if "first_step_s" in settings:
        drive.QUEUE = [replace(run, first_step_s=settings["first_step_s"]) for run in drive.QUEUE]
    os.environ["BEHAVIOUR"] = json.dumps(settings.get("behaviour", {}))
    drive.HalfHour = partial(
        drive.HalfHour, world="fake_drive", command=(sys.executable, __file__), memory=Path(settings["work"]),
        every_s=0.0, grace_s=6.0, limit_s=settings.get("limit_s", 60.0),
    )  # fmt: skip
    if part := settings.get("part"):
        from gpu.drive import Setting
        from gpu.record import Record

        drive.QUEUE = [run for run in drive.QUEUE if run.name in settings["only"]]
        given = Setting("cuda", False, "node8", None, settings["out"], settings["work"])
        drive.run(given, Record(Path(part)))
        return 0
    return drive.main([
        "--foreground", "--out", settings["out"], "--work", settings["work"], "--only", settings["only"],
        "--minutes", str(settings.get("minutes", 10)),
    ])  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(command(sys.argv[1:]) if len(sys.argv) > 2 else drive(json.loads(sys.argv[1])))
