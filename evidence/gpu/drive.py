"""Runs the parts one after the other, each in a separate process with a time limit, and keeps their results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from gpu import children, record
from gpu.machine import code_version, environment, slug
from gpu.parts import Part

GRACE_S = 2.5 * children.GRACE_S  # a part that trains gives its run the time to stop
MAX_LINES, MAX_LINE = 2000, 300


@dataclass(frozen=True)
class Setting:
    """The settings that every part gets."""

    device: str
    tiny: bool
    hardware: str
    model: str | None
    out: str
    work: str

    def results(self, device_name: str) -> Path:
        return Path(self.out) / "results" / slug(device_name, self.tiny)


def drive(parts: Sequence[Part], setting: Setting, machine: Mapping, *, again: bool = False) -> bool:
    """Run the parts; returns whether every part that can run here is done without a row that is off."""
    folder = setting.results(machine["device"])
    model = Path(setting.model).name if setting.model else None
    good = True
    for part in parts:
        path = folder / f"{part.name}.json"
        of = {
            "tiny": setting.tiny, "hardware": setting.hardware, "model": model, "version": code_version(part.files),
            **machine,
        }  # fmt: skip
        before = record.read(path)
        ours = before is not None and all(before.get(key) == value for key, value in of.items())
        if ours and before["state"] == "done" and not again:
            print(f"{part.name}: done already, {before['when']} (--again runs it again)", flush=True)
        elif why := part.missing(machine):
            print(f"{part.name}: not run: {why}", flush=True)
            if not (before and before["rows"]):
                record.write(path, {"part": part.name, **of, "state": "not run", "why": why, "rows": []})
            continue
        else:
            kept = (
                {key: before[key] for key in ("rows", "runs") if key in before} if ours and not again else {}
            )
            head = {"part": part.name, **of, "when": f"{datetime.now(UTC):%Y-%m-%d}", "state": "running"}
            record.write(path, head | {"rows": []} | kept)
            _run(part, setting, path)
        found = record.read(path)
        good &= found["state"] == "done" and all(row["verdict"] != record.OFF for row in found["rows"])
    return good


def _run(part: Part, setting: Setting, path: Path) -> None:
    limit = part.tiny_limit_s if setting.tiny else part.limit_s
    print(f"{part.name}: {part.what}\n  predicted: {part.predicted}; at most {limit} s", flush=True)
    start = time.monotonic()
    code, last = _child(part.module, setting, path, limit)
    found = record.read(path)
    found["seconds"] = round(time.monotonic() - start, 1)
    found["state"] = "done" if code == 0 else "cut" if code is None else "failed"
    if code is None:
        found["why"] = f"cut after {limit} s; its rows so far are kept, and the next call continues"
    elif code:
        found["why"] = f"exit code {code}: {' | '.join(last)[-record.MAX_TEXT :]}"
    record.write(path, found)
    print(
        f"  {found['state']} in {found['seconds']} s{': ' + found['why'] if found.get('why') else ''}",
        flush=True,
    )


def _child(module: str, setting: Setting, path: Path, limit: float) -> tuple[int | None, list[str]]:
    """(exit code, or None when it was cut; last lines). What it started ends with it."""
    code = "import sys; from gpu.drive import part; part(*sys.argv[1:])"
    threads = {"OMP_NUM_THREADS": "1"} if setting.device == "cpu" else {}
    leave = children.below(os.getpid())
    process = children.start(
        [sys.executable, "-W", "ignore", "-c", code, module, json.dumps(asdict(setting)), str(path)],
        env=environment() | threads, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip
    last: deque[str] = deque(maxlen=5)
    reader = threading.Thread(target=_echo, args=(process, last), daemon=True)
    reader.start()
    try:
        process.wait(limit)
        return process.returncode, list(last)
    except subprocess.TimeoutExpired:
        return None, list(last)
    finally:
        children.end(process, leave, GRACE_S)
        reader.join(5)


def _echo(process: subprocess.Popen, last: deque[str]) -> None:
    """Print a limited number of its lines, shortened. All are read, so that the process does not block."""
    for number, text in enumerate(process.stdout):
        if text.strip():
            last.append(text.rstrip()[:MAX_LINE])
            if number < MAX_LINES:
                print(last[-1], flush=True)


def part(module: str, setting: str, path: str) -> None:
    """The child process."""
    import importlib

    given = Setting(**json.loads(setting))
    importlib.import_module(module).run(given, record.Record(Path(path)))
