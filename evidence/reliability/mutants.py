"""Breaks one line at a time, drawn at random, and asks the fast tests that run this line (mutants.md has the results).

    python evidence/reliability/mutants.py map [TESTS ...]   # which fast test runs which line; these files or folders anew
    python evidence/reliability/mutants.py run [--count 100] # of each half; what mutants.jsonl holds is not tried again
    python evidence/reliability/mutants.py again [TEXT ...]  # the survivors once more, with TEXT in FILE:LINE
    python evidence/reliability/mutants.py retry             # every recorded one in today's tree, wherever its line is now
    python evidence/reliability/mutants.py table

With --seed 21 the last four are about another draw, whose record is mutants_21.jsonl.

`map` needs coverage.py. All of it happens in a copy of the tree, one process at a time.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from difflib import SequenceMatcher
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import yaml
from line_map import IMPORT
from places import Place, places
from results import FOLDER

ROOT = Path(__file__).resolve().parents[2]
RECORD = FOLDER / "mutants.jsonl"
MAP = ROOT / "build" / "mutants" / "lines.json"  # not kept in the repository
HALVES = {
    "credit": ["verl_credit/credit"],
    "host, turns": ["verl_credit/host", "verl_credit/turns"],
}
FAST = "not e2e and not slow"
GONE = "gone"  # written into the record by hand: the code that it broke was needless, and is deleted
SEED = 20
PACKAGES = {
    "retriever": "verl_credit_retriever",
    "recipes": "verl_credit_recipes",
}  # as pyproject.toml maps them
LOADED_ONCE = {  # and nothing of ours that a mutant changes
    "credit": ["torch", "pydantic", "hydra._internal.config_loader_impl"],
    "host, turns": [
        "torch",
        "pydantic",
        "hydra._internal.config_loader_impl",
        "transformers",
        "verl.trainer.ppo.ray_trainer",
    ],
}
MEMORY = 12 << 30
Tests = dict[str, list[str]]  # by file


def drawn(half: str, count: int, seed: int = SEED) -> list[Place]:
    """The first ones of a shuffled list of all places, so that more of them begin with the same."""
    files = sorted(path for folder in HALVES[half] for path in (ROOT / folder).rglob("*.py"))
    found = [place for path in files for place in places(str(path.relative_to(ROOT)), path.read_text())]
    random.Random(seed).shuffle(found)
    return found[:count]


@contextmanager
def copied_tree() -> Iterator[Path]:
    """What git tracks or would track, in a folder from which this process and its children import."""
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        tree = Path(folder).resolve() / "tree"
        named = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        for name in filter(None, named.split("\0")):
            if (ROOT / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, tree / name)
        for name, package in PACKAGES.items():
            (tree / package).symlink_to(name)
        sys.path.insert(0, str(tree))
        sys.dont_write_bytecode = True
        here = str(Path(__file__).parent)
        path = ":".join(filter(None, [str(tree), here, os.environ.get("PYTHONPATH")]))
        os.environ |= {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        os.chdir(tree)
        yield tree
        os.chdir(ROOT)


# --- which test runs which line ----------------------------------------------------------------------


def write_map(chosen: list[str]) -> None:
    folders = ":".join(folder for half in HALVES.values() for folder in half)
    known = read_map() if chosen and MAP.exists() else {}
    with copied_tree():
        new = Path("lines.json").resolve()
        os.environ |= {"LINE_MAP": str(new), "LINE_MAP_FOLDERS": folders}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "line_map",
            "-p",
            "no:cacheprovider",
            "-n0",
            "-m",
            FAST,
        ]
        subprocess.run([*command, *chosen])
        found = json.loads(new.read_text())
    kept = {test: entry for test, entry in known.items() if not test.startswith(tuple(chosen))}
    for file, lines in known.get(IMPORT, {"lines": {}})["lines"].items():
        found[IMPORT]["lines"][file] = sorted({*found[IMPORT]["lines"].get(file, ()), *lines})
    MAP.parent.mkdir(parents=True, exist_ok=True)
    MAP.write_text(json.dumps(kept | found))


def read_map() -> dict[str, dict]:
    return json.loads(MAP.read_text())


def tests_of(place: Place, line_map: dict) -> Tests:
    """The tests that run a line, the quickest files and in them the quickest tests first. None: no test runs it.

    A line that runs while its module is imported, and at no other time, is tried by the tests of the whole module.
    """
    lines = _statement(place)
    covers = {
        test: set(entry["lines"].get(place.file, ())) for test, entry in line_map.items() if entry["passed"]
    }
    while_imported = covers.pop(IMPORT) & lines
    chosen = [test for test, covered in covers.items() if covered & lines]
    if not chosen and while_imported:
        chosen = [test for test, covered in covers.items() if covered]
    by_file: Tests = {}
    for test in sorted(chosen, key=lambda test: line_map[test]["seconds"]):
        by_file.setdefault(test.split("::")[0], []).append(test)
    return dict(sorted(by_file.items(), key=lambda item: sum(line_map[test]["seconds"] for test in item[1])))


def _statement(place: Place) -> set[int]:
    """The place's line; where Python counts no line of its own there (in a long expression), the statement's lines."""
    tree = ast.parse((ROOT / place.file).read_text())
    around = [n for n in ast.walk(tree) if isinstance(n, ast.stmt) and n.lineno <= place.line <= n.end_lineno]
    inner = max(around, key=lambda n: n.lineno)
    simple = not hasattr(inner, "body")
    return set(range(inner.lineno, inner.end_lineno + 1)) if simple else {place.line, inner.lineno}


# --- one mutant --------------------------------------------------------------------------------------


class Chosen:
    """A plugin of pytest: these tests only, in this order, and the first one that fails."""

    def __init__(self, tests: list[str]):
        self.place = {test: number for number, test in enumerate(tests)}
        self.failed: str | None = None

    def pytest_collection_modifyitems(self, items):
        items[:] = [item for item in items if item.nodeid in self.place]
        items.sort(key=lambda item: self.place[item.nodeid])

    def pytest_collectreport(self, report):
        self.pytest_runtest_logreport(report)

    def pytest_runtest_logreport(self, report):
        if report.outcome == "failed" and self.failed is None:
            self.failed = report.nodeid


def _run_tests(tests: Tests, answer) -> None:
    """In a process of its own: sends the first test that fails, or None."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    silent = os.open(os.devnull, os.O_RDWR)
    os.dup2(silent, 1), os.dup2(silent, 2)
    for file, chosen in tests.items():
        plugin = Chosen(chosen)
        words = ["-x", "-n0", "-m", FAST, "-p", "no:cacheprovider", "--hypothesis-seed=0", file]
        code = pytest.main(words, plugins=[plugin])
        if code != pytest.ExitCode.OK:
            answer.send(plugin.failed or f"{file}: pytest ended with {code}")
            return
    answer.send(None)


def first_failure(tests: Tests, file: str, limit_s: float) -> str | None:
    """A module that was loaded before the fork would not be read again: its mutants start a fresh Python."""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    context = multiprocessing.get_context("spawn" if module in sys.modules else "fork")
    shutil.rmtree(".hypothesis", ignore_errors=True)
    mine, theirs = context.Pipe()
    process = context.Process(target=_run_tests, args=(tests, theirs))
    process.start()
    theirs.close()
    try:
        return mine.recv() if mine.poll(limit_s) else "the time limit"
    except EOFError:
        return "a crash"
    finally:
        try:
            os.killpg(process.pid, 9)
        except ProcessLookupError:
            process.kill()
        process.join()


def attempt(tree: Path, place: Place, line_map: dict, whole_files: bool = False) -> dict:
    """What is recorded of a mutant. A test counts as its killer only if it passes without it."""
    tests = tests_of(place, line_map)
    if not tests:
        return {"verdict": "not covered", "by": None, "seconds": 0.0}
    if whole_files:  # those that were mapped last first: they were written for the survivors
        passing = [test for test, entry in reversed(line_map.items()) if entry["passed"] and test != IMPORT]
        files = dict.fromkeys(test.split("::")[0] for test in passing)
        tests = {f: [t for t in passing if t.split("::")[0] == f] for f in files if f in tests}
    limit_s = 60 + 5 * sum(line_map[test]["seconds"] for file in tests.values() for test in file)
    target = tree / place.file
    original = target.read_text()
    lines = original.splitlines(keepends=True)
    assert lines[place.line - 1].rstrip("\n") == place.before, place
    lines[place.line - 1] = place.after + "\n"
    began = time.perf_counter()
    while True:
        target.write_text("".join(lines))
        by = first_failure(tests, place.file, limit_s)
        target.write_text(original)
        if by is None or not (wrong := _fails_unbroken(by, place.file, tests, limit_s)):
            seconds = round(time.perf_counter() - began, 1)
            return {"verdict": "survived" if by is None else "killed", "by": by, "seconds": seconds}
        print(f"left out, because it fails without the mutant: {wrong}", flush=True)
        tests = {f: [t for t in chosen if t != wrong] for f, chosen in tests.items() if f != wrong}
        tests = {f: chosen for f, chosen in tests.items() if chosen}


_passed: set[str] = set()


def _fails_unbroken(by: str, file: str, tests: Tests, limit_s: float) -> str | None:
    """The killer, if it fails without the mutant too: a test, or a file that was not collected."""
    test_file = by.split("::")[0].split(": pytest")[0]
    if by in _passed or test_file not in tests:
        return None
    alone = {test_file: [by] if "::" in by else tests[test_file]}
    if first_failure(alone, file, limit_s) is not None:
        return by if "::" in by else test_file
    _passed.add(by)
    return None


# --- what is kept, and what is told -------------------------------------------------------------------


def record_of(seed: int) -> Path:
    return RECORD if seed == SEED else RECORD.with_stem(f"mutants_{seed}")


def recorded(record: Path) -> list[dict]:
    return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


def run(count: int, halves: list[str], seed: int) -> None:
    line_map, record = read_map(), record_of(seed)
    done = {(row["file"], row["line"], row["before"], row["after"]) for row in recorded(record)}
    with copied_tree() as tree:
        for half in halves:
            _load(half)
            for place in drawn(half, count, seed):
                if (place.file, place.line, place.before, place.after) not in done:
                    _keep([{"half": half, **asdict(place), **attempt(tree, place, line_map)}], "a", record)


def again(words: list[str], seed: int) -> None:
    """By whole test files, because one test may look at what another one computed. The first verdict stays in the record.

    A line that was written anew has the same mutation in the record, and its old text as ``line_at_first``.
    """
    line_map, record = read_map(), record_of(seed)
    rows = recorded(record)
    with copied_tree() as tree:
        for row in rows:
            if row["verdict"] not in ("killed", GONE) and (
                not words or any(word in f"{row['file']}:{row['line']}" for word in words)
            ):
                _load(row["half"])
                row["line"] = where_it_is_now(row)
                place = Place(*(row[name] for name in ("file", "line", "kind", "before", "after")))
                at_first = row.get("at_first", row["verdict"])
                row |= attempt(tree, place, line_map, whole_files=True) | {"at_first": at_first}
                _keep(rows, "w", record, row)


def retry(seed: int) -> None:
    """Tries every recorded mutant in the tree as it is now; build/mutants/ gets the verdicts, and keeps what is done.

    A line that moved is found by its text, and one that was written anew by the place that is most like it.
    """
    line_map, record = read_map(), MAP.with_name(f"retried_{seed}.jsonl")
    rows = recorded(record)
    with copied_tree() as tree:
        for half in HALVES:
            _load(half)
            candidates = drawn(half, 10**9, seed)
            for row in (row for row in recorded(record_of(seed)) if row["half"] == half):
                was = {
                    "was": row["verdict"],
                    **{f"{name}_was": row[name] for name in ("file", "line", "before", "after")},
                }
                if any(all(one[name] == value for name, value in was.items()) for one in rows):
                    continue
                place = most_like(row, candidates)
                found = (
                    attempt(tree, place, line_map)
                    if place
                    else {"verdict": "not there", "by": None, "seconds": 0.0}
                )
                rows.append({"half": half, **(asdict(place) if place else row), **was, **found})
                _keep(rows, "w", record)
    for half in HALVES:
        own = [row for row in rows if row["half"] == half]
        counts = {name: Counter(row[name] for row in own) for name in ("was", "verdict")}
        print(f"{half}: was {dict(counts['was'])}, is {dict(counts['verdict'])}")


def most_like(row: dict, candidates: list[Place]) -> Place | None:
    """The place with the same kind of fault whose line is most like the recorded one; None below a likeness of .75."""
    wanted = f"{row['before'].strip()}\n{row['after'].strip()}"

    def likeness(place: Place) -> tuple[float, bool]:
        text = f"{place.before.strip()}\n{place.after.strip()}"
        matcher = SequenceMatcher(None, text, wanted, autojunk=False)
        close = matcher.real_quick_ratio() >= 0.75 and matcher.quick_ratio() >= 0.75
        return matcher.ratio() if close else 0.0, Path(place.file).name == Path(row["file"]).name

    best = max((place for place in candidates if place.kind == row["kind"]), key=likeness)
    return best if likeness(best)[0] >= 0.75 else None


def where_it_is_now(row: dict) -> int:
    """The number of the mutant's line, which later commits may have moved. Raises ValueError when it is not there."""
    lines = (ROOT / row["file"]).read_text().splitlines()
    found = [number for number, line in enumerate(lines, start=1) if line == row["before"]]
    if not found:
        raise ValueError(f"{row['file']}: {row['before'].strip()!r} is not there any more")
    return min(found, key=lambda number: abs(number - row["line"]))


def _load(half: str) -> None:
    yaml.Dumper = yaml.CDumper  # before OmegaConf derives its own from it, as in tests/conftest.py
    for name in LOADED_ONCE[half]:
        importlib.import_module(name)
    for plugin in entry_points(group="pytest11"):
        plugin.load()


def _keep(rows: list[dict], mode: str, record: Path, shown: dict | None = None) -> None:
    with record.open(mode) as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    row = shown or rows[-1]
    print(f"{row['file']}:{row['line']}  {row['before'].strip()}  ->  {row['after'].strip()}", flush=True)
    print(f"    {row['verdict']} by {row['by']}, {row['seconds']} s", flush=True)


def table(seed: int) -> None:
    rows = recorded(record_of(seed))
    print(
        "| half | places | drawn | died at first | survived | not covered | dead now | gone |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    for half in HALVES:
        own = [row for row in rows if row["half"] == half]
        first = Counter(row.get("at_first", row["verdict"]) for row in own)
        now = Counter(row["verdict"] for row in own)
        counts = f"{first['killed']} | {first['survived']} | {first['not covered']} | {now['killed']} | {now[GONE]}"
        print(f"| {half} | {len(drawn(half, 10**9))} | {len(own)} | {counts} |")
    print("\n| kind | drawn | dead now |\n|---|---|---|")
    dead = Counter(row["kind"] for row in rows if row["verdict"] == "killed")
    for kind, count in Counter(row["kind"] for row in rows).most_common():
        print(f"| {kind} | {count} | {dead[kind]} |")
    print("\n| where | line | becomes | at first | now |\n|---|---|---|---|---|")
    for row in rows:
        if row.get("at_first", row["verdict"]) != "killed":
            at_first = row.get("at_first", row["verdict"])
            now = f"killed by {row['by']}" if row["verdict"] == "killed" else row["verdict"]
            texts = " | ".join(f"`{row[name].strip()}`".replace("|", r"\|") for name in ("before", "after"))
            print(
                f"| {row['file'].removeprefix('verl_credit/')}:{row['line']} | {texts} | {at_first} | {now} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("map").add_argument("words", nargs="*")
    drawing = commands.add_parser("run")
    drawing.add_argument("--count", type=int, default=100)
    drawing.add_argument("--half", choices=HALVES)
    trying = commands.add_parser("again")
    trying.add_argument("words", nargs="*")
    for command in (drawing, trying, commands.add_parser("retry"), commands.add_parser("table")):
        command.add_argument("--seed", type=int, default=SEED)
    chosen = parser.parse_args()
    match chosen.command:
        case "map":
            write_map(chosen.words)
        case "run":
            run(chosen.count, [chosen.half] if chosen.half else list(HALVES), chosen.seed)
        case "again":
            again(chosen.words, chosen.seed)
        case "retry":
            retry(chosen.seed)
        case "table":
            table(chosen.seed)


if __name__ == "__main__":
    main()
