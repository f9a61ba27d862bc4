"""The peaks of a run's phases beside its plan, from lines written by hand."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "evidence"))

from gpu.half_hour import phases
from gpu.half_hour.phases import PHASES, rows, sample, timeline

from verl_credit.records.run.files import EVENTS, append_json, read_json_lines

GIB = 2**30
LIVE = ("weights", "gradients", "temporaries", "logits", "bucket")


def planned(**phases):
    """``name=parts`` in GiB, for names with _ for a space and __ for ": "."""
    names = {
        name: name.replace("__", ": ").replace("_", " ").replace("log prob", "log-prob") for name in phases
    }
    return {
        "phases": [
            {
                "name": names[name],
                "where": "device",
                "total": sum(parts.values()) * GIB,
                "live_bytes": sum(gib for part, gib in parts.items() if part in LIVE) * GIB,
            }
            for name, parts in phases.items()
        ]
        + [{"name": "host", "where": "host", "total": 900.0 * GIB, "live_bytes": 0.0}]
    }


PLAN = planned(
    rollout={"weights": 8, "engine": 40, "contexts": 1, "fragmentation": 1},
    weight_sync={"weights": 8, "bucket": 2, "engine weights": 7},
    log_prob={"weights": 8, "logits": 4, "engine asleep": 1, "contexts": 1},
    update__loss={"weights": 8, "logits": 6, "contexts": 1},
    update__backward={"weights": 8, "gradients": 12, "index": 3, "host: processes": 5},
    update__optimizer_step={"weights": 8, "gradients": 8, "temporaries": 2},
    asleep={"weights": 8, "engine asleep": 1, "contexts": 1},
)


@pytest.fixture
def run_dir(tmp_path):
    append_json(tmp_path / EVENTS, {"time": 10.0, "kind": "start", "text": "start"})
    return tmp_path


@pytest.fixture
def line(run_dir):
    """Writes a phase of ``step``, which is in the ten seconds from 10 · step on."""

    def write(step, phase, start, end, gib=None, **more):
        row = {"step": step, "phase": phase, "start": 10.0 * step + start, "end": 10.0 * step + end}
        if gib is not None:
            row |= {
                "rank": 0,
                "device": "cuda",
                "allocated": gib * GIB,
                "reserved": (gib + 1) * GIB,
                "note": None,
            }
        append_json(run_dir / PHASES, row | more)

    return write


@pytest.fixture
def whole_step(line):
    def write(step, log_prob, update, optimizer, sync, later=0):
        line(step, "rollout", later + 1, later + 4)
        line(step, "falling asleep", later + 4, later + 4.5)
        line(step, "log-prob", later + 5, later + 6, log_prob)
        line(step, "update", later + 6, later + 8, update)
        line(step, "optimizer step", later + 7, later + 8, optimizer)
        line(step, "weight sync", later + 8, later + 9, sync)

    return write


def table(run_dir, plan=PLAN, samples=None):
    path = None
    if samples is not None:
        path = run_dir / "device.jsonl"
        for at, mib in samples:
            append_json(path, {"time": at, "gpu": 0, "mib": mib})
    return {row.pop("phase"): row for row in rows(run_dir, plan, path)}


def test_every_phase_is_beside_the_plan(run_dir, line, whole_step):
    line(0, "weight sync", 11, 12, 99)  # the start's own
    whole_step(1, 50, 50, 50, 50)  # the first step does not count
    whole_step(2, 10, 18, 17, 11)
    whole_step(3, 15, 16, 9, 12)
    line(3, "log-prob", 5, 6, 13, rank=1)
    # during the rollouts of steps 1, 2, 3; while asleep (step 2); in an update
    samples = [(12, 99_999), (22, 40_960), (33.9, 45_056), (24.7, 10_240), (26.5, 70_000)]
    found = table(run_dir, samples=samples)
    assert list(found) == ["log-prob", "update", "optimizer step", "weight sync", "rollout", "asleep"]
    numbers = {name: (row["found_gib"], row["planned_gib"], row["ratio"]) for name, row in found.items()}
    assert numbers == {
        "log-prob": (15, 12, 1.25),  # step 3, rank 0; planned without engine and contexts
        "update": (18, 20, 0.9),  # planned: the backward, without the index and the host's part
        "optimizer step": (17, 18, pytest.approx(17 / 18)),
        "weight sync": (12, 10, 1.2),
        "rollout": (44, 50, 0.88),
        "asleep": (10, 10, 1.0),
    }
    assert found["log-prob"]["note"] == "16.00 GiB reserved"
    assert found["rollout"]["note"] == found["asleep"]["note"] == ""


def test_without_a_second_step_the_first_counts_and_is_named(run_dir, whole_step):
    whole_step(1, 10, 18, 17, 11)
    found = table(run_dir, samples=[(12, 1024)])
    assert found["update"]["found_gib"] == 18 and found["rollout"]["found_gib"] == 1
    for name in ("log-prob", "update", "optimizer step", "weight sync", "rollout"):
        assert found[name]["note"].endswith("step 1 alone, the first of its start")
    assert found["asleep"]["found_gib"] is None
    assert found["asleep"]["note"] == "no sample of the device in the 0.5 s of this phase"


def test_the_first_step_after_a_resume_does_not_count(run_dir, whole_step):
    whole_step(1, 50, 50, 50, 50)
    whole_step(2, 10, 18, 17, 11)
    append_json(run_dir / EVENTS, {"time": 30.0, "kind": "start", "text": "start"})
    whole_step(3, 60, 60, 60, 60)
    assert table(run_dir)["update"]["found_gib"] == 18


def test_a_steps_sleep_ends_with_the_log_probs_of_its_own_step_and_start(run_dir, line, whole_step):
    whole_step(1, 1, 1, 1, 1)
    whole_step(2, 1, 1, 1, 1)
    line(3, "falling asleep", 4, 4.5)  # and the run is killed
    append_json(run_dir / EVENTS, {"time": 100.0, "kind": "start", "text": "start"})
    whole_step(1, 1, 1, 1, 1, later=100)
    whole_step(2, 1, 1, 1, 1, later=100)
    samples = [(24.7, 2048), (36, 9999), (124.8, 3072)]
    assert table(run_dir, samples=samples)["asleep"]["found_gib"] == 3


def test_what_is_missing_says_so(run_dir, line, whole_step):
    short = {"phases": [phase for phase in PLAN["phases"] if phase["name"] not in ("asleep", "log-prob")]}
    empty = table(run_dir, short)
    assert all(row["found_gib"] is None and row["ratio"] is None for row in empty.values())
    assert all("phases.jsonl" in row["note"] for row in empty.values())
    assert empty["asleep"]["planned_gib"] is None and "the plan has no such phase" in empty["asleep"]["note"]
    for step in (1, 2):
        line(step, "log-prob", 5, 6, allocated=None, reserved=None, device="cpu", note="it cannot be reset")
        line(step, "update", 6, 8, 3, device="cpu")
        line(step, "rollout", 1, 4)
    found = table(run_dir, short)
    assert found["log-prob"] == {
        "found_gib": None, "planned_gib": None, "ratio": None,
        "note": "it cannot be reset; the plan has no such phase",
    }  # fmt: skip
    assert (found["update"]["found_gib"], found["update"]["note"]) == (
        3,
        "resident size of the whole process",
    )
    assert found["optimizer step"]["note"] == "no line in phases.jsonl"
    assert found["rollout"]["note"] == "no sample of the device: nvidia-smi gave none"


def test_a_phase_that_failed_keeps_its_peak_and_its_reason(run_dir, line):
    line(2, "update", 6, 8, 70, note="ended by OutOfMemoryError")
    row = table(run_dir)["update"]
    assert row["found_gib"] == 70 and "ended by OutOfMemoryError" in row["note"]


def test_the_times_of_the_last_start(run_dir):
    assert timeline(run_dir) == [(0.0, "start")]
    later = (
        (62.25, "stage", "engine"),
        (61.0, "stage", "actor"),
        (63.0, "turn_length", "warning: a turn was cut"),
    )
    for at, kind, text in ((20.5, "start", "start"), *later):
        append_json(run_dir / EVENTS, {"time": at, "kind": kind, "text": text})
    assert timeline(run_dir) == [(0.0, "start"), (40.5, "actor"), (41.75, "engine")]
    assert timeline(run_dir / "absent") == []


def test_the_sampler_writes_what_nvidia_smi_says_with_times_and_nothing_without_one(tmp_path, monkeypatch):
    monkeypatch.setattr(phases.shutil, "which", lambda name: None)
    with sample(tmp_path / "none.jsonl"):
        pass
    assert not (tmp_path / "none.jsonl").exists()
    lines = ["0, 512\n", "1, 700\n", "0, [N/A]\n", "0, 600\n"]
    process = SimpleNamespace(stdout=lines, kill=lambda: None, wait=lambda: None)
    monkeypatch.setattr(phases.shutil, "which", lambda name: name)
    monkeypatch.setattr(phases.subprocess, "Popen", lambda command, **_: process)
    with sample(tmp_path / "some.jsonl"):
        pass
    found = read_json_lines(tmp_path / "some.jsonl")
    assert [(row["gpu"], row["mib"]) for row in found] == [(0, 512), (1, 700), (0, 600)]
    assert all(row["time"] > 1.7e9 for row in found)
