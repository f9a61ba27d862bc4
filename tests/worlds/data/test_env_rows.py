"""`prepare env`: a row for each seed with the environment's first observation, as the agent loop compares it."""

import pyarrow.parquet as parquet
import pytest

from kit.environments import CORRIDOR, FAULTY
from kit.in_process import Here
from verl_credit.cli import main
from verl_credit.config.keys import Environment
from verl_credit.errors import PreflightError
from verl_credit.recipe.doctor.data import Reads, read_rows
from verl_credit.recipe.doctor.rows import look_at
from verl_credit.worlds.data import env_rows
from verl_credit.worlds.data.records import PrepareError

IN_ENVIRONMENT = Reads(searches=False, agents=("env_agent",), default_loop="env_agent")


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.setattr(env_rows, "Pool", Here)


def prepare(out, *keys, seeds="0:4", held_out="10:12", path=CORRIDOR):
    return main(
        ["prepare", "env", "--out", str(out), "--path", path, "--seeds", seeds, "--held-out", held_out, *keys]
    )


def test_a_row_for_each_seed(tmp_path, capsys):
    assert prepare(tmp_path / "d", "environment.kwargs.length=3") == 0
    assert "4 rows, 3 different" in capsys.readouterr().out
    rows = parquet.read_table(tmp_path / "d/train.parquet").to_pylist()
    assert [row["extra_info"]["environment"]["seed"] for row in rows] == [0, 1, 2, 3]
    first = rows[1]["extra_info"]["environment"]["observation"]
    assert first == rows[1]["prompt"][-1]["content"] == "room 1 of 3\nActions: left, right"
    assert rows[0]["agent_name"] == "env_agent" and rows[0]["data_source"] == "Corridor"
    assert rows[0]["prompt"][0]["role"] == "system" and "options" not in rows[0]["extra_info"]["environment"]
    held = parquet.read_table(tmp_path / "d/val.parquet").to_pylist()
    assert [row["extra_info"]["environment"]["seed"] for row in held] == [10, 11]


def test_the_options_of_a_reset_may_name_the_seed_and_the_prompt_is_a_file(tmp_path):
    (tmp_path / "p.txt").write_text("Walk.\n")
    more = ("--options", '{"start": 1, "game": "g{seed}"}', "--prompt", str(tmp_path / "p.txt"))
    assert prepare(tmp_path / "d", *more, "environment.list_actions=false") == 0
    (row, *_) = parquet.read_table(tmp_path / "d/train.parquet").to_pylist()
    assert row["extra_info"]["environment"]["options"] == {"start": 1, "game": "g0"}
    assert [message["content"] for message in row["prompt"]] == ["Walk.", "room 1 of 2"]


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"seeds": "4:4"}, "--seeds=4:4"), ({"seeds": "x:4"}, "--seeds=x:4"), ({"held_out": "4"}, "--held-out=4"),
        ({"held_out": "3:5"}, "the first 3"), ({"path": "no_module.Class"}, "seed 0"), ({"path": FAULTY}, "seed 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_prepared_is_refused(tmp_path, capsys, changes, named):
    options = ("--options", '{"fault": "raises", "at_reset": true}') if changes.get("path") == FAULTY else ()
    assert prepare(tmp_path / "d", *options, **changes) == 4
    assert named in capsys.readouterr().out and not (tmp_path / "d").exists()


@pytest.mark.parametrize("key, named", [("environment.widow=1", "environment.widow"), ("seed=1", "seed=1"),
                                        ("environment.max_steps=0", "environment.max_steps")])  # fmt: skip
def test_a_wrong_key_is_refused(tmp_path, capsys, key, named):
    assert prepare(tmp_path / "d", key) == 4 and named in capsys.readouterr().out


def test_a_form_of_ones_own_needs_a_prompt(tmp_path):
    given = Environment(path=CORRIDOR, action="my_module.f")
    with pytest.raises(PrepareError, match="--prompt"):
        env_rows.prepare_environment(given, {"train": range(2)}, tmp_path / "d")


def test_the_checks_before_a_start_read_the_rows(tmp_path):
    prepare(tmp_path / "d", "environment.kwargs.length=2")
    rows = read_rows(str(tmp_path / "d/train.parquet"), "data.train_files", IN_ENVIRONMENT)
    assert [row.task["seed"] for row in rows] == [0, 1, 2, 3] and look_at(rows, "k", IN_ENVIRONMENT) == []
    table = parquet.read_table(tmp_path / "d/train.parquet").to_pylist()
    for wrong in (None, {"seed": None}, {"seed": -1}, {"seed": "1"}, {"seed": 1, "options": "x"}):
        import pyarrow as pa

        row = table[0] | {"extra_info": {"environment": wrong, "index": 0}}
        parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "w.parquet")
        with pytest.raises(PreflightError, match=r"row 0: extra_info\.environment"):
            read_rows(str(tmp_path / "w.parquet"), "k", IN_ENVIRONMENT)


def test_rows_of_an_environment_in_another_run_are_refused(tmp_path):
    prepare(tmp_path / "d")
    with pytest.raises(PreflightError, match=r"agent_name='env_agent'.*environment\.path"):
        read_rows(str(tmp_path / "d/train.parquet"), "data.train_files", Reads(agents=("search_agent",)))


def test_prepare_check_shows_a_row_of_an_environment(tmp_path, capsys):
    prepare(tmp_path / "d")
    assert main(["prepare", "check", str(tmp_path / "d/train.parquet"), "--no-search"]) == 0
    assert "4 rows can train" in (said := capsys.readouterr().out) and "seed 0" in said
