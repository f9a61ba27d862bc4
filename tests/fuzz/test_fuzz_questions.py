"""Published question sets with anything in them: `prepare` writes rows that train, or one line, and deletes nothing."""

from __future__ import annotations

import copy
import csv
import json
import random
from io import StringIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet

from kit.damage import damaged_bytes, damaged_value
from kit.fuzz import ACCEPTED, REFUSED, checker_of, command, contents, cuts, one_plain_line, told, try_all
from kit.prepared import WORKED, assert_law
from verl_credit.errors import ExitCode

WORKED_OF = [(form.split()[0], record) for form, (record, *_) in WORKED.items()]
SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".parquet")
OPTIONS = (
    [],
    [],
    ["--limit=1"],
    ["--val-size=1"],
    ["--splits=val"],
    ["--overwrite"],
    ["--val-size=1", "--seed=-1"],
)


def make(seed: int) -> tuple[str, str, list[dict], list[str], bool]:
    """(data set, suffix, records, options, whether the bytes are damaged, too)"""
    draw = random.Random(seed)
    name = draw.choice(WORKED_OF)[0]
    others = [record for other, record in WORKED_OF if other == name]
    records = [copy.deepcopy(draw.choice(others)) for _ in range(draw.choice((1, 2, 4)))]
    for number, one in enumerate(records):
        for key in {"question", "Question"} & set(one):
            one[key] += f" {number}"
    for _ in range(draw.choice((0, 1, 2, 4))):
        damaged_value(records, draw)
    return name, draw.choice(SUFFIXES), records, draw.choice(OPTIONS), draw.random() < 0.3


def held(records: list, suffix: str) -> bytes:
    """The content of a file; JSON lines where the suffix's form cannot hold the records."""
    if suffix == ".json":
        return json.dumps(records).encode()
    rows = [row for row in records if isinstance(row, dict)]
    try:
        if suffix == ".parquet":
            sink = pa.BufferOutputStream()
            parquet.write_table(pa.Table.from_pylist(rows), sink)
            return sink.getvalue().to_pybytes()
        if suffix in (".csv", ".tsv"):
            text = StringIO()
            names = list(dict.fromkeys(name for row in rows for name in row))
            writer = csv.DictWriter(text, names, delimiter="\t" if suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
            return text.getvalue().encode()
    except (pa.ArrowException, UnicodeError, OverflowError, TypeError, ValueError, csv.Error):
        pass
    return "".join(json.dumps(row) + "\n" for row in records).encode()


def law(folder: Path, name: str, source: Path, options: list[str], before_out: bool) -> str:
    out, before = folder / "out", contents(folder)
    code, said, err = command("prepare", name, f"--source={source}", f"--out={out}", *options)
    after = contents(folder)
    assert not err
    kept = {path: content for path, content in before.items() if not path.startswith("out")}
    if code == ExitCode.PREFLIGHT:
        assert after == before, "a refusal changed the folder"
        one_plain_line(said)
        assert said.startswith("verl-credit prepare: ")
        assert any(word in said for word in ("--", str(folder), source.name))
        return REFUSED
    assert code == ExitCode.DONE and not (before_out and "--overwrite" not in options)
    assert {path: after.get(path) for path in kept} == kept, "another file has changed"
    assert_law(out)
    return ACCEPTED


@checker_of
def checker(folder: Path, seed: int) -> str:
    (name, suffix, records, options, damaged), draw = make(seed), random.Random(-seed - 1)
    (folder / "data").mkdir()
    source = folder / "data" / f"train{suffix}"
    content = held(records, suffix)
    source.write_bytes(damaged_bytes(content, draw)[1] if damaged else content)
    if before_out := draw.random() < 0.2:  # what an earlier prepare wrote, and a file of the user's
        (folder / "out").mkdir()
        (folder / "out" / draw.choice(("train.parquet", "mine.txt"))).write_text("before")
    with told((name, options, records, source.name)):
        return law(folder, name, draw.choice((source, source.parent)), options, before_out)


@cuts(20)
def test_a_question_set_becomes_rows_that_train_or_is_refused_in_one_line(seeds, tmp_path):
    with checker(tmp_path) as check:
        try_all(check, seeds)
