"""Damaged folders of runs: `report` and `diff` end with their result, or with one line that names what is damaged."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from kit.fuzz import FUZZ_CASES
from kit.report_page import Page, write_run
from verl_credit.cli import main
from verl_credit.errors import ExitCode
from verl_credit.report import write_report

ODD = (
    "text", None, [], [1, "a"], {}, {"a": 1}, True, -1, 0.5, 10**400, 1e308, -1e308, float("nan"), float("inf"), "\ud800",
    "\x00", "<b>", "x" * 100_000, [[[[]]]],
)  # fmt: skip


def write(folder: Path) -> None:
    write_run(folder)
    (folder / "versions.json").write_text(json.dumps({"python": "3.11.9", "torch": "2.11.0"}))


def damage(folder: Path, draw: random.Random) -> str:
    """One damage; returns what was done."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
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


BYTES = {
    "cut": lambda content, place, draw: content[:place],
    "flip": lambda content, place, draw: content[:place] + draw.randbytes(1) + content[place + 1 :],
    "flip many": lambda content, place, draw: bytes(b ^ (draw.random() < 0.02) * 32 for b in content),
    "insert": lambda content, place, draw: content[:place] + draw.randbytes(5) + content[place:],
    "twice": lambda content, place, draw: content[:place] + content,
    "empty": lambda content, place, draw: b"",
    "BOM": lambda content, place, draw: b"\xef\xbb\xbf" + content,
    "UTF-16": lambda content, place, draw: content.decode("utf-8", "replace").encode("utf-16"),
    "CRLF": lambda content, place, draw: content.replace(b"\n", b"\r\n"),
    "long line": lambda content, place, draw: content[:place] + b"[" * 50_000 + content[place:],
    "nulls": lambda content, place, draw: content[:place] + bytes(100),
}


def odd_value(file: Path, draw: random.Random) -> str:
    """Another value anywhere in a line, as JSON can hold it."""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    number = draw.randrange(len(lines) or 1)
    try:
        row = json.loads(lines[number])
    except (ValueError, RecursionError, IndexError):
        return "not changed: damaged before"
    value, at = draw.choice(ODD), ""
    node = row
    while isinstance(node, dict | list) and node:
        name = draw.choice(list(node) if isinstance(node, dict) else range(len(node)))
        at += f"[{name!r}]"
        if not isinstance(node[name], dict | list) or draw.random() < 0.3:
            node[name] = value
            break
        node = node[name]
    lines[number] = json.dumps(row)
    file.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return f"line {number + 1}{at} = {repr(value)[:60]}"


def law(folder: Path, whole: Path, capsys) -> None:
    try:
        Page(write_report(folder).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        assert not isinstance(error, UnicodeError), repr(error)
        said = str(error)
        assert said.isprintable() and str(folder) in said, f"report: {said!r}"
    for pair in ((str(folder), str(whole)), (str(whole), str(folder))):
        code = main(["diff", *pair])
        said = capsys.readouterr().out
        said.encode()
        assert code in (ExitCode.DONE, ExitCode.DIFFERENT, ExitCode.PREFLIGHT)
        if code == ExitCode.PREFLIGHT:
            assert said.startswith("verl-credit diff: ") and str(folder) in said, f"diff: {said!r}"
            assert said.count("\n") == 1 and said[:-1].isprintable(), f"diff: {said!r}"


@pytest.mark.parametrize(
    "seeds",
    [range(20), pytest.param(range(20, 20 + FUZZ_CASES // 5), marks=pytest.mark.slow)],
    ids=["a cut", "more"],
)
def test_a_damaged_run_is_told_in_a_report_or_in_one_line(seeds, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("verl_credit.report.page.panel_data_uri", lambda panel: "data:,")  # a second each
    monkeypatch.setattr("verl_credit.report.write.curves_png", lambda panels: b"")
    whole = tmp_path / "whole"
    whole.mkdir()
    write(whole)
    for seed in seeds:
        folder, draw = tmp_path / str(seed), random.Random(seed)
        folder.mkdir()
        write(folder)
        done = [damage(folder, draw) for _ in range(draw.choice((1, 1, 2, 3)))]
        try:
            law(folder, whole, capsys)
        except Exception as error:
            pytest.fail(f"seed {seed}: {done}\n{type(error).__name__}: {error}")
        shutil.rmtree(folder)
