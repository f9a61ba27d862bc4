"""Damaged tables of trials: every command answers, names what it did not read, and a new row leaves every byte before it."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kit.damage import damaged_bytes
from kit.fuzz import ACCEPTED, REFUSED, Check, command, contents, cuts, one_plain_line, told, try_all
from kit.trials import trial
from verl_credit.errors import ExitCode
from verl_credit.records.lineage import FailureLabel, LineageStore

# fmt: off
CELLS = (
    "", " ", "text", "a\tb", "a\nb", 'say "it"', '"', '""', "'", "a\r\nb", "\r", "é🜂", "\x1b[31m", "\u202e", "\u2028", "|",
    "`a`", "``` \n# head", "<b>", "x" * 5000, "exp_1", "=1+1", "nan", "1e999", "\ufeff", "\x0b", "\x85", "a, b",
)
# fmt: on
IDS = ("1", "2", "a b", 'x"y', "é", "exp", "3", "4")
NUMBERS = (None, 0.0, -0.5, 1e308, -1e308, 0.1, 1e-320)


def write(folder: Path, draw: random.Random) -> list[str]:
    """A store of trials with odd cells; returns their ids."""
    store, ids = LineageStore(folder, lower_is_better=False), draw.sample(IDS, draw.choice((0, 1, 3, 5)))
    folder.mkdir(parents=True, exist_ok=True)
    for number, exp_id in enumerate(ids):
        cell = {
            name: draw.choice(CELLS)
            for name in (
                "hypothesis",
                "notes",
                "specialist",
                "job_name",
                "timestamp",
                "domain",
                "expected_delta",
            )
        }
        parent = draw.choice(("", "gone", *ids[: number + 1]))
        metric = draw.choice(NUMBERS)
        status = draw.choice(list(FailureLabel))
        row = trial(exp_id, status, metric, parent_exp=parent, **cell)
        store.append(lambda _, row=row: row)
    return ids


def damage(folder: Path, draw: random.Random) -> str:
    """One damage; returns what was done."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    if not files:
        return "nothing to damage"
    file = draw.choice(files)
    if draw.random() < 0.1:
        file.unlink()
        if draw.random() < 0.5:
            file.mkdir()
        return f"{file.name}: deleted, or a folder in its place"
    what, content = damaged_bytes(file.read_bytes(), draw)
    file.write_bytes(content)
    return f"{file.name}: {what}"


def law(folder: Path) -> str:
    before, verdict = contents(folder), ACCEPTED
    code, _, err = command("lineage", "render", f"--dir={folder}", f"--out={folder.parent / 'page.md'}")
    if code or "not read: " in err:
        verdict = REFUSED
    assert code in (ExitCode.DONE, ExitCode.PREFLIGHT)
    assert all(line.isprintable() for line in err.split("\n")), f"not printable: {err!r:.600}"
    if code == ExitCode.PREFLIGHT:
        assert str(folder) in err.splitlines()[-1], f"names no folder: {err!r:.600}"
        one_plain_line(err.splitlines()[-1] + "\n")
    assert contents(folder) == before, "a command that reads has changed the store"
    added(folder, before)
    return verdict


def added(folder: Path, before: dict[str, bytes | None]) -> None:
    """A row more, or a refusal that leaves the table as it is; nothing that stood there changes."""
    store, new = LineageStore(folder, lower_is_better=False), trial("new", "discard", 0.5, notes="a\tb\nc")
    try:
        store.append(lambda _: new)
    except (ValueError, OSError) as error:
        assert str(folder) in str(error) and str(error).isprintable(), repr(error)
        after = contents(folder)
        assert {name: after.get(name) for name in before} == before
        return
    after = contents(folder)
    assert all(after[name].startswith(content) for name, content in before.items())
    assert store.all_trials()[-1] == new


@contextmanager
def checker(work: Path) -> Iterator[Check]:
    def check(seed: int) -> str:
        draw, folder = random.Random(seed), work / str(seed) / "store"
        ids = write(folder, draw)
        with told([ids, *(damage(folder, draw) for _ in range(draw.choice((0, 1, 1, 2, 3))))]):
            verdict = law(folder)
        shutil.rmtree(folder.parent)
        return verdict

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)  # most of the time
        yield check


@cuts(20, failed=(3593, 3697))
def test_a_damaged_table_is_read_as_far_as_it_goes_and_keeps_its_bytes(seeds, tmp_path):
    with checker(tmp_path) as check:
        try_all(check, seeds)
