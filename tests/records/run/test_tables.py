"""Credit tables on disk: whole or not there, replaced by a step that is made again, and refused when they are not ours."""

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from verl_credit.records.run.table_files import (
    TURNS,
    TURNS_SCHEMA,
    DamagedTable,
    read_table,
    table_path,
    tables_of,
    write_table,
)

PIPELINE = {"mode": "none"}


def turns(n=2, **changes):
    line = {
        "uid": "a", "group": 0, "row": 0, "turn": 0, "answer": False, "tokens": 5, "has_reward": True, "reward": 0.1,
        "z": 0.5, "signals": [("info_gain", 0.1)], "anchor": None, "value": None, "advantage": 0.5, "clip_scale": 1.0,
        "valid": True, "outcome": 1.0, "outcome_advantage": 0.25,
    }  # fmt: skip
    return {name: [value] * n for name, value in (line | changes).items()}


def test_what_is_written_is_read(tmp_path):
    path = write_table(tmp_path, TURNS, 12, turns(), PIPELINE)
    table = read_table(path)
    assert path.name == "turns_000012.parquet" and (table.step, table.pipeline) == (12, PIPELINE)
    assert table.columns["reward"] == [0.1, 0.1] and table.columns["signals"][0] == [("info_gain", 0.1)]
    assert table.columns["anchor"] == table.columns["value"] == [None, None]


def test_a_write_that_fails_leaves_the_old_table(tmp_path, monkeypatch):
    path = write_table(tmp_path, TURNS, 1, turns(2), PIPELINE)

    def full(table, file, **_):
        file.write(b"PAR1 half")
        raise OSError("No space left on device")

    monkeypatch.setattr(parquet, "write_table", full)
    with pytest.raises(OSError, match="No space"):
        write_table(tmp_path, TURNS, 1, turns(5), PIPELINE)
    monkeypatch.undo()
    assert len(read_table(path).columns["row"]) == 2 and list(tables_of(tmp_path, TURNS)) == [1]


def other(path):
    parquet.write_table(pa.table({"x": [1]}), path)


def later(path):
    table = pa.table(turns(), schema=TURNS_SCHEMA.with_metadata({b"verl_credit": b'{"version": 3}'}))
    parquet.write_table(table, path)


def half(path):
    write_table(path.parent.parent, TURNS, 1, turns(500), PIPELINE)
    path.write_bytes(path.read_bytes()[:-200])


def lacking(path):
    about = b'{"version": 2, "step": 1, "pipeline": {}, "update": null}'
    schema = pa.schema([("x", pa.int32())], {b"verl_credit": about})
    parquet.write_table(pa.table({"x": [1]}, schema=schema), path)


@pytest.mark.parametrize(
    "damage, said",
    [
        (half, "cannot be read"),
        (other, "no table that this version wrote"),
        (later, "no table that this version wrote"),
        (lacking, "cannot be read"),
        (lambda path: path.write_bytes(b""), "cannot be read"),
        (lambda path: path.mkdir(), "cannot be read"),
    ],
)
def test_what_is_no_table_is_named(tmp_path, damage, said):
    path = table_path(tmp_path, TURNS, 1)
    path.parent.mkdir()
    damage(path)
    with pytest.raises(DamagedTable, match=said) as raised:
        read_table(path)
    assert str(path) in str(raised.value)


def test_other_files_in_the_folder_are_no_tables(tmp_path):
    folder = table_path(tmp_path, TURNS, 1).parent
    assert tables_of(tmp_path, TURNS) == {}
    folder.mkdir()
    for name in ("turns_000001.parquet.partial", "turns_1.parquet", "notes.txt", "others_000001.parquet"):
        (folder / name).write_text("")
    assert tables_of(tmp_path, TURNS) == {}
