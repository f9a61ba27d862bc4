"""Damaged folders of runs: `report` and `diff` end with their result, or with one line that names what is damaged."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from kit.damage import BYTES, damaged_value
from kit.fuzz import ACCEPTED, REFUSED, Check, command, contents, cuts, one_plain_line, told, try_all
from kit.report_page import Page, write_run
from verl_credit.errors import ExitCode
from verl_credit.records.report.write import write_report


def write(folder: Path) -> None:
    write_run(folder)
    (folder / "versions.json").write_text(json.dumps({"python": "3.11.9", "torch": "2.11.0"}))


def damage(folder: Path, draw: random.Random) -> str:
    """One damage; returns what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    file, other = draw.choice(files), draw.choice(files)
    content = file.read_bytes()
    place = draw.randrange(len(content) + 1)
    kind = draw.choice((*BYTES, *["value"] * 6, "delete", "swap", "folder"))
    if kind in BYTES:
        file.write_bytes(BYTES[kind](content, place, draw))
    elif kind == "value" and file.suffix == ".jsonl":
        return f"{file.name}: {odd_value(file, draw)}"
    elif kind == "delete":
        file.unlink()
    elif kind == "swap":
        file.write_bytes(other.read_bytes())
        other.write_bytes(content)
        return f"{file.name} and {other.name} swapped"
    elif kind == "folder":
        file.unlink()
        file.mkdir()
    return f"{file.name}: {kind} at byte {place} of {len(content)}"


def odd_value(file: Path, draw: random.Random) -> str:
    """Another value anywhere in a line, as JSON can hold it."""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    number = draw.randrange(len(lines) or 1)
    try:
        row = json.loads(lines[number])
    except (ValueError, RecursionError, IndexError):
        return "not changed: damaged before"
    if not isinstance(row, dict | list):
        return "not changed: damaged before"
    what = damaged_value(row, draw)
    lines[number] = json.dumps(row)
    file.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return f"line {number + 1}{what}"


def law(folder: Path, whole: Path) -> str:
    before, verdict = contents(folder), ACCEPTED
    try:
        Page(write_report(folder).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        assert not isinstance(error, UnicodeError), repr(error)
        said, verdict = str(error), REFUSED
        assert said.isprintable() and str(folder) in said, f"report: {said!r}"
    after = contents(folder)
    assert {name: after.get(name) for name in before} == before, "the report changed or deleted what it reads"
    for pair in ((folder, whole), (whole, folder)):
        code, said, _ = command("diff", *map(str, pair))
        assert code in (ExitCode.DONE, ExitCode.DIFFERENT, ExitCode.PREFLIGHT)
        if code == ExitCode.PREFLIGHT:
            verdict = REFUSED
            assert said.startswith("verl-credit diff: ") and str(folder) in said, f"diff: {said!r}"
            one_plain_line(said)
    return verdict


@contextmanager
def checker(work: Path) -> Iterator[Check]:
    whole = work / "whole"
    whole.mkdir()
    write(whole)

    def check(seed: int) -> str:
        folder, draw = work / str(seed), random.Random(seed)
        folder.mkdir()
        write(folder)
        with told([damage(folder, draw) for _ in range(draw.choice((1, 1, 2, 3)))]):
            verdict = law(folder, whole)
        shutil.rmtree(folder)
        return verdict

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "verl_credit.records.report.page.panel_data_uri", lambda panel: "data:,"
        )  # a second each
        yield check


@cuts(20, share=5, failed=(1130, 30247))
def test_a_damaged_run_is_told_in_a_report_or_in_one_line(seeds, tmp_path):
    with checker(tmp_path) as check:
        try_all(check, seeds)
