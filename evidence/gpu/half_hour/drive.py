"""Half an hour on one GPU: a queue of training runs in order of value, with a table that is complete whenever it is cut.

    python evidence/gpu/half_hour/drive.py [--out FOLDER] [--work FOLDER] [--minutes 30] [--only R1,R3]
    python evidence/gpu/half_hour/drive.py --follow 500      waits, prints the newest rows, and leaves the queue alone
    python evidence/gpu/half_hour/drive.py --stop            ends the queue and everything that it started
    python evidence/gpu/half_hour/drive.py --device cpu --tiny --foreground      the same at a size for two cores

The driver moves to a process session of its own and goes on when the caller's shell is gone. FOLDER has table.md,
half_hour.json, and per run what it printed, its events, metrics and memory by phase; all are renewed every ten seconds.
Called again with the same FOLDER it runs what is not done. Exit code 0: all runs are done and nothing was off, or the
driver was started; 1: something was off, cut or failed; 3: --follow, and the driver has ended; 4: a wrong command.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).resolve().parent
# `gpu` and `verl_credit`; not this folder, whose files have plain names
sys.path[:1] = [str(HERE.parents[1]), str(HERE.parents[2])]

from gpu import children, record  # noqa: E402
from gpu.half_hour import table  # noqa: E402
from gpu.half_hour.half_hour import HalfHour  # noqa: E402
from gpu.half_hour.order import QUEUE  # noqa: E402
from gpu.half_hour.table import DONE  # noqa: E402
from gpu.machine import code_version, here  # noqa: E402
from gpu.parts import TRAINING  # noqa: E402

NAME, MINUTES, NEWEST = "half_hour", 30, 20
START_S, STOP_S = 180, 2 * children.GRACE_S + 30
NOT_HERE, ENDED = 4, 3


def run(setting, kept: record.Record) -> None:
    """The part `half_hour` of `make gpu-evidence`. Raises RuntimeError where a run is not done: the next call goes on."""
    work, names = Path(setting.work).resolve(), [one.name for one in QUEUE]
    queue(setting, kept, work / NAME, work, MINUTES, names, here(setting.device))
    states = kept.content["runs"].items()
    undone = [(name, one) for name, one in states if one["state"] != DONE]
    if undone:
        raise RuntimeError("; ".join(f"{name} {one['state']}: {one.get('why', '')}" for name, one in undone))


def queue(
    setting, kept: record.Record, out: Path, work: Path, minutes: float, only: list[str], facts: dict
) -> bool:
    children.adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    runs = sorted((one for one in QUEUE if one.name in only), key=lambda one: only.index(one.name))
    hardware = "spark" if setting.hardware == "spark" else "h100x1"  # one GPU is enough, wherever it is
    return HalfHour(
        kept, out, work, setting.device, setting.tiny, hardware, minutes, facts, queue=runs
    ).run()  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(given)
    names = [one.name for one in QUEUE]
    options.only = options.only.split(",") if options.only else names
    if unknown := set(options.only) - set(names):
        print(f"--only: {', '.join(sorted(unknown))}: expected {', '.join(names)}", file=sys.stderr)
        return NOT_HERE
    if options.device == "cpu" and not options.tiny:
        print("--device cpu needs --tiny: the full sizes take a CPU days", file=sys.stderr)
        return NOT_HERE
    options.out = options.out.resolve()
    if options.stop:
        return stop(options.out)
    if options.follow is not None:
        return follow(options.out, options.follow)
    if pid := running(options.out):
        print(f"process {pid} works on {options.out} already; --follow SECONDS shows it", file=sys.stderr)
        return NOT_HERE
    return foreground(options) if options.foreground else detach(options.out, given)


def foreground(options) -> int:
    kept, facts = record.Record(options.out / f"{NAME}.json"), here(options.device)
    kept.content |= {
        "part": NAME, "tiny": options.tiny, "hardware": options.hardware, "when": f"{datetime.now(UTC):%Y-%m-%d}",
        "version": code_version(TRAINING), **facts,
    }  # fmt: skip
    good = queue(options, kept, options.out, options.work.resolve(), options.minutes, options.only, facts)
    print(shown(options.out))
    return 0 if good else 1


def detach(out: Path, given: list[str]) -> int:
    """Start the same command in a session of its own; returns when it has written its table."""
    out.mkdir(parents=True, exist_ok=True)
    before = (out / "table.md").stat().st_mtime_ns if (out / "table.md").exists() else 0
    with (out / "driver.txt").open("a") as log:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, "--foreground", *given], stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def written() -> bool:
        return (out / "table.md").exists() and (out / "table.md").stat().st_mtime_ns > before

    if _until(lambda: written() or process.poll() is not None, START_S) and written():
        print(f"process {process.pid} has begun; --follow SECONDS --out {out} shows it")
        return 0
    print((out / "driver.txt").read_text(errors="replace")[-2000:], file=sys.stderr)
    return 1


def follow(out: Path, seconds: float) -> int:
    """Wait, print the table and return; at once if no driver works on the folder."""
    _until(lambda: not running(out), seconds)
    print(shown(out))
    return 0 if running(out) else ENDED


def stop(out: Path) -> int:
    """SIGTERM; the driver ends its run, and writes the table."""
    pid = running(out)
    if not pid:
        print(f"nothing works on {out}", file=sys.stderr)
        return NOT_HERE
    os.kill(pid, signal.SIGTERM)
    ended = _until(lambda: not running(out), STOP_S)
    print(shown(out))
    return 0 if ended else 1


def running(out: Path) -> int:
    """The process of the driver that works on the folder, or 0."""
    pid = (record.read(out / f"{NAME}.json") or {}).get("pid", 0)
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return 0
    return pid if any(part.endswith(b"drive.py") for part in command) else 0


def shown(out: Path) -> str:
    """The newest rows, and below them the line of every run."""
    content = record.read(out / f"{NAME}.json")
    if content is None:
        return f"there is no table in {out} yet"
    newest = [record.line(row) for row in content["rows"][-NEWEST:]]
    return "\n".join([*newest, "", f"{content['state']}; all rows: {out / 'table.md'}", table.runs(content)])


def _until(met, seconds: float) -> bool:
    over = time.monotonic() + seconds
    while not met() and time.monotonic() < over:
        time.sleep(0.2)
    return bool(met())


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
    parser.add_argument("--foreground", action="store_true", help="stay in this process session")
    parser.add_argument("--follow", type=float, metavar="SECONDS", help="wait, print the newest rows, return")
    parser.add_argument("--stop", action="store_true", help="end the queue")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
