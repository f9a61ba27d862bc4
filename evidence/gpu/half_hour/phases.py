"""Peak memory of every phase, where a run has phases.jsonl (commit 23dae403 last wrote it), and the times of its start.

The actor's phases come from phases.jsonl: live tensors of its process. The rollout and the engine that sleeps come from
the device's samples between the times that phases.jsonl has for them: everything on the device.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from verl_credit.records.run.events import STAGE, START
from verl_credit.records.run.files import EVENTS, append_json, read_json_lines

GIB = 2**30
PHASES = "phases.jsonl"
ACTOR = {
    "log-prob": ("log-prob",),
    "update": ("update: loss", "update: backward"),
    "optimizer step": ("update: optimizer step",),
    "weight sync": ("weight sync",),
}
"""Phase of the actor's process -> the plan's phases, of which the largest counts."""
FIRST = "step {} alone, the first of its start"
CPU = "resident size of the whole process"


class Found(NamedTuple):
    bytes: float | None
    note: str


def rows(run_dir: Path, plan: dict, device_samples: Path | None) -> list[dict]:
    """A row per phase: phase, found_gib and planned_gib (None where there is none), ratio (found / planned), note.

    ``plan``: what `verl-credit plan --json` prints. ``device_samples``: a file of `sample`. The steps after the first of a
    start count; the first alone counts where there is no other, and the note says so.
    """
    lines = read_json_lines(run_dir / PHASES)
    samples = read_json_lines(device_samples) if device_samples is not None else []
    planned = {phase["name"]: phase for phase in plan["phases"] if phase["where"] == "device"}
    table = []
    for name, parts in ACTOR.items():
        live = [planned[part]["live_bytes"] for part in parts if part in planned]
        table.append(_row(name, _actor(lines, name, _first_steps(run_dir, lines)), max(live, default=None)))
    for name, found in (("rollout", _rollout), ("asleep", _asleep)):
        of_all = planned[name]["total"] if name in planned else None
        table.append(_row(name, found(lines, samples, _first_steps(run_dir, lines)), of_all))
    return table


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


def timeline(run_dir: Path) -> list[tuple[float, str]]:
    """(seconds since the last start of the run, the stage that was reached), in order of time."""
    events = read_json_lines(run_dir / EVENTS)
    begin = max((at for at, event in enumerate(events) if event["kind"] == START), default=None)
    if begin is None:
        return []
    since = events[begin]["time"]
    return sorted(
        (event["time"] - since, event["text"]) for event in events[begin:] if event["kind"] in (START, STAGE)
    )


def _row(name: str, found: Found, planned: float | None) -> dict:
    ratio = found.bytes / planned if found.bytes is not None and planned else None
    notes = [found.note, "" if planned is not None else "the plan has no such phase"]
    return {
        "phase": name,
        "found_gib": None if found.bytes is None else found.bytes / GIB,
        "planned_gib": None if planned is None else planned / GIB,
        "ratio": ratio,
        "note": "; ".join(filter(None, notes)),
    }


def _first_steps(run_dir: Path, lines: Sequence[dict]) -> set[int]:
    """The first step of every start: of the steps whose rollouts began between a start and the next."""
    starts = [event["time"] for event in read_json_lines(run_dir / EVENTS) if event["kind"] == START] or [0.0]
    ends = [*starts[1:], float("inf")]
    of_starts = (
        [line["step"] for line in lines if start <= line["start"] < end and line["phase"] != "weight sync"]
        for start, end in zip(starts, ends, strict=True)
    )
    return {min(steps) for steps in of_starts if steps}


def _later(lines: Sequence[dict], name: str, first: set[int]) -> tuple[list[dict], str]:
    """(the phase's lines after the first step of a start, or else all; what to say about them)."""
    every = [line for line in lines if line["phase"] == name and line["step"] > 0]
    later = [line for line in every if line["step"] not in first]
    if later or not every:
        return later, ""
    return every, FIRST.format(max(line["step"] for line in every))


def _actor(lines: Sequence[dict], name: str, first: set[int]) -> Found:
    counted, note = _later(lines, name, first)
    if not counted:
        return Found(None, f"no line in {PHASES}")
    notes = {line["note"] for line in counted if line["note"]}
    measured = [line for line in counted if line["allocated"] is not None]
    if not measured:
        return Found(None, "; ".join(sorted(notes)))
    if any(line["device"] == "cpu" for line in measured):
        of = CPU
    else:
        of = f"{max(line['reserved'] for line in measured) / GIB:.2f} GiB reserved"
    return Found(
        max(line["allocated"] for line in measured), "; ".join(filter(None, [of, note, *sorted(notes)]))
    )


def _rollout(lines: Sequence[dict], samples: Sequence[dict], first: set[int]) -> Found:
    spans, note = _later(lines, "rollout", first)
    if not spans:
        return Found(None, f"no line in {PHASES}")
    return _largest(samples, [(span["start"], span["end"]) for span in spans], note)


def _asleep(lines: Sequence[dict], samples: Sequence[dict], first: set[int]) -> Found:
    """From the engine's sleep to the step's first log-probs: the actor has its state and computes nothing."""
    slept, note = _later(lines, "falling asleep", first)
    spans = []
    for span in slept:
        after = [
            line["start"]
            for line in lines
            if line["phase"] in ACTOR and line["step"] == span["step"] and line["start"] >= span["end"]
        ]
        spans += [(span["end"], min(after))] if after else []
    if not spans:
        return Found(None, f"no time between sleep and log-probs in {PHASES}")
    return _largest(samples, spans, note)


def _largest(samples: Sequence[dict], spans: list[tuple[float, float]], note: str) -> Found:
    if not samples:
        return Found(None, "no sample of the device: nvidia-smi gave none")
    within = [one["mib"] for one in samples if any(start <= one["time"] <= end for start, end in spans)]
    if not within:
        seconds = sum(end - start for start, end in spans)
        return Found(None, f"no sample of the device in the {seconds:.1f} s of this phase")
    return Found(max(within) * 2**20, note)
