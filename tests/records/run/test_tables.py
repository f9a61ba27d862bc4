"""Credit tables on disk: whole or not there, replaced by a step that is made again, and refused when they are not ours."""

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from verl_credit.records.run.tables import (
    ROLLOUTS,
    ROLLOUTS_SCHEMA,
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


def test_a_step_made_again_replaces_its_own_and_leaves_nothing_beside_it(tmp_path):
    write_table(tmp_path, TURNS, 1, turns(2), PIPELINE)
    write_table(tmp_path, TURNS, 2, turns(2), PIPELINE)
    write_table(tmp_path, TURNS, 1, turns(5), PIPELINE)
    found = tables_of(tmp_path, TURNS)
    assert list(found) == [1, 2] and len(read_table(found[1]).columns["row"]) == 5
    assert len(list((tmp_path / "tables").iterdir())) == 2


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
    parquet.write_table(
        pa.table({"x": [1]}, schema=pa.schema([("x", pa.int32())], {b"verl_credit": about})), path
    )


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


def test_the_disk_that_tables_take_is_bounded(tmp_path):
    """The number that the documentation states, with values that do not repeat: 40 bytes a turn."""
    import random

    rng = random.Random(0)
    columns = turns(4000)
    for name in ("reward", "advantage", "clip_scale", "outcome_advantage"):
        columns[name] = [rng.random() for _ in range(4000)]
    columns["signals"] = [[("info_gain", value)] for value in columns["reward"]]
    columns["row"] = [i // 4 for i in range(4000)]
    assert write_table(tmp_path, TURNS, 1, columns, PIPELINE).stat().st_size < 40 * 4000


def test_rollouts_take_at_most_the_disk_that_is_stated(tmp_path):
    """60 bytes a token, with a reference, importance weights, uncertainties, and nothing that repeats."""
    import random

    rng, n = random.Random(0), 2000
    numbers = ("advantage", "old_log_prob", "entropy", "clip_scale", "ref_log_prob", "rollout_is_weight")
    numbers += ("uncertainty", "pooled_uncertainty", "weight")
    columns = {name: [[rng.random() for _ in range(n)] for _ in range(8)] for name in numbers}
    columns |= {
        name: [[rng.random() < 0.7 for _ in range(n)] for _ in range(8)]
        for name in ("written", "trained", "planning")
    }
    columns |= {
        "turn": [[i // 500 for i in range(n)]] * 8,
        "prompt_ids": [[1, 2, 3]] * 8,
        "outcome": [1.0] * 8,
    }
    columns |= {"response_ids": [[rng.randrange(150_000) for _ in range(n)] for _ in range(8)]}
    columns |= {"uid": ["a"] * 8, "group": [0] * 8, "row": list(range(8))}
    columns |= {"pieces": [[f" w{rng.randrange(5000)}" for _ in range(n)] for _ in range(8)]}
    columns = dict.fromkeys(ROLLOUTS_SCHEMA.names, [None] * 8) | columns
    path = write_table(tmp_path, ROLLOUTS, 12, columns, {})
    assert path.name == "rollouts_000012.parquet" and path.stat().st_size < 60 * 8 * n
    read = read_table(path).columns
    assert read["response_ids"] == columns["response_ids"] and read["written"] == columns["written"]
