"""The script that draws inputs in bulk: it knows every kind of the fuzz tests, and counts what they say."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from kit.fuzz import ACCEPTED, REFUSED, TooSlow, time_limit, told, try_all

ROOT = Path(__file__).parents[2]
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "evidence/reliability")
    inputs = importlib.import_module("inputs")


def odd_seeds_are_refused_and_7_fails(seed):
    with told({"seed": seed}):
        assert seed != 7, "seven"
    return REFUSED if seed % 2 else ACCEPTED


def test_it_knows_every_kind():
    files = {path.stem.removeprefix("test_fuzz_") for path in (ROOT / "tests/fuzz").glob("test_fuzz_*.py")}
    assert set(inputs.KINDS) == files


def test_a_range_is_counted_and_a_failure_is_told_with_its_case(tmp_path):
    row = inputs.run_span(odd_seeds_are_refused_and_7_fails, 0, 9)
    assert (row["range"], row["accepted"], row["refused"]) == ([0, 9], 5, 4)
    assert row["failures"] == [{"seed": 7, "why": "AssertionError: seven\nassert 7 != 7\n{'seed': 7}"}]
    file = tmp_path / "inputs.jsonl"
    file.write_text(
        "".join(json.dumps({"kind": "rows", **one}) + "\n" for one in (row, {**row, "failures": []}))
    )
    assert inputs.read_lines(file) == {("rows", 0, 9): {"kind": "rows", **row, "failures": []}}
    assert "| all | 10 | 5 | 4 | 1 |" in inputs.table([{"kind": "rows", **row}])


def test_a_failing_seed_and_a_hang_end_the_test():
    with pytest.raises(pytest.fail.Exception, match="seed 7: AssertionError: seven"):
        try_all(odd_seeds_are_refused_and_7_fails, range(10))

    with pytest.raises(TooSlow), time_limit(0.01):
        while True:
            pass


def test_make_reliability_neither_reads_nor_adds_to_the_published_results(tmp_path, monkeypatch):
    """With them a fresh clone would measure nothing, and show these as its own."""
    monkeypatch.syspath_prepend(ROOT / "evidence/reliability")
    names = ("kills", "long_run", "mutants", "inputs", "load", "heap")
    for name in ("results", *names):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("RELIABILITY", str(tmp_path / "anew"))
    kills, long_run, mutants, *others = map(importlib.import_module, names)
    files = kills.RESULTS, long_run.RESULT, mutants.record_of(mutants.SEED), mutants.record_of(21)
    assert {file.parent for file in files} == {tmp_path / "anew"}
    assert {script.FOLDER for script in others if hasattr(script, "FOLDER")} == {tmp_path / "anew"}
    assert kills.RUNS == long_run.RUNS == tmp_path / "anew" / "runs" and kills.read() == {}
    for name in ("results", *names):
        monkeypatch.delitem(sys.modules, name)
