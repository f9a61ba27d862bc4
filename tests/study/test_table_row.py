"""Rows of the table of credits: their file, their pairs, a user's mode, and what is refused."""

import json
import re
import sys

import pytest

from verl_credit.cli import main
from verl_credit.errors import PreflightError
from verl_credit.records.run.files import DamagedFile
from verl_credit.study.table_columns import AREAS, COLUMNS, Size, columns_of, measure_row
from verl_credit.study.table_row import ROWS, Measured, difference, row_of

TINY = Size(pairs=2, steps=2, seed=77, unseen=4, tasks=32)
MINE = "def mine(tables, *, weight: float = 1.0):\n    return tables.reward_B_K * weight, tables.outcome_B, tables.ones()\n"


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "table_mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "table_mine:mine"


@pytest.mark.slow
def test_a_users_mode_makes_a_row_beside_grpos_and_what_is_there_is_not_made_again(mine, tmp_path):
    row = row_of(mine, {"weight": 2.0})
    lines = [*measure_row(row, tmp_path, ["chain H 2", "coin collector 12"], TINY)]
    assert [line.split()[0] for line in lines] == ["chain", "coin"] and all("±" in line for line in lines)
    file, known = Measured.of(row, tmp_path), Measured.of(row_of("none"), tmp_path)
    for column in ("chain H 2", "coin collector 12"):
        one, of_grpo = file.columns[column], known.columns[column]
        assert one["settings"] == of_grpo["settings"] and len(one["area"]) == len(of_grpo["area"]) == 2
        assert (
            one["signals"] == ["turn rewards"]
            and one["shuffled"] != one["area"]
            and "shuffled" not in of_grpo
        )
    file.add("chain H 2", file.columns["chain H 2"] | {"area": [1.0, 2.0]})
    (line,) = measure_row(row, tmp_path, ["chain H 2"], TINY)
    assert "±" in line and Measured.of(row, tmp_path).columns["chain H 2"]["area"] == [1.0, 2.0]


@pytest.mark.slow
def test_grpo_minus_grpo_is_0_and_its_own_cell_is_its_area(tmp_path):
    (line,) = measure_row(row_of("none"), tmp_path, ["chain H 2"], TINY)
    area = Measured.of(row_of("none"), tmp_path).columns["chain H 2"]["area"]
    assert line.split()[-1] == f"{sum(area) / 2:.1f}"
    same = difference(area, area)
    assert (same.mean, same.half, same.wins) == (0.0, 0.0, False)
    (line,) = measure_row(row_of("none", {"outcome_operator": "grpo"}), tmp_path, ["chain H 2"], TINY)
    assert line.split()[-3:] == ["+0.0", "±", "0.0"]


def test_a_difference_is_students():
    one = difference([3.0, 5.0, 7.0], [1.0, 1.0, 1.0])
    assert one.mean == 4.0 and one.half == pytest.approx(4.303 * 2 / 3**0.5, abs=1e-3) and not one.wins
    assert difference([3.0, 4.0, 5.0], [1.0, 1.0, 1.0]).wins


@pytest.mark.slow
def test_fewer_rollouts_a_question_stand_beside_grpos_eight(tmp_path):
    row = row_of("turn_gae", {"lam": 0.5}, "state", 2)
    (line,) = measure_row(row, tmp_path, ["chain H 2"], TINY)
    assert row.name == "turn_gae, values state, lam 0.5, n 2" and "(" in line
    settings = [
        Measured.of(one, tmp_path).columns["chain H 2"]["settings"]["n"] for one in (row, row_of("none"))
    ]
    assert settings == [2, 8]


def test_other_seeds_are_no_pairs(tmp_path):
    [*measure_row(row_of("none"), tmp_path, ["chain H 2"], TINY)]
    with pytest.raises(
        PreflightError, match=r"rows\.jsonl: chain H 2 of none has .*'seed': 77.*expected .*'seed': 5"
    ):
        [*measure_row(row_of("joint"), tmp_path, ["chain H 2"], Size(2, 2, 5, 4, 32))]


def test_a_mode_that_refuses_its_options_says_why_in_its_cell(tmp_path):
    row = row_of("calibadv", {"evidence": "sigmoid", "zero_if_all_found": True})
    (line,) = measure_row(row, tmp_path, ["chain H 2"], TINY)
    assert "zero_if_all_found" in line and "area" not in Measured.of(row, tmp_path).columns["chain H 2"]


def test_a_world_whose_package_is_absent_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium.envs.toy_text.taxi", None)
    with pytest.raises(PreflightError, match=r"Taxi needs the package gymnasium.*verl-credit\[env\]"):
        [*measure_row(row_of("none"), tmp_path, ["Taxi"], Size(2, 2, 78, 4, 32))]


def test_columns_are_chosen_by_their_beginnings():
    assert columns_of([]) == [*COLUMNS] and columns_of(["chain", "taxi"]) == [*AREAS[:4], "Taxi"]


@pytest.mark.parametrize(
    "words, said",
    [
        (["--only", "lake"], "--only lake.*Taxi"),
        (["--n", "3"], "--n 3.*2, 4, 8, 16, 32"),
        (["--values", "state"], "--values state.*joint reads no values"),
    ],
)
def test_refused_in_one_line(words, said, capsys, tmp_path):
    assert main(["bench", "joint", "--dir", str(tmp_path / "out"), *words]) == 4
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1 and re.search(said, printed)


@pytest.mark.slow  # sums over all groups of trajectories
def test_the_command_writes_a_row(mine, tmp_path, capsys):
    assert main(["bench", mine, "--dir", str(tmp_path / "rows"), "--only", "exact"]) == 0
    saved = json.loads((tmp_path / "rows" / "rows.jsonl").read_text())
    low, high = saved["cosine"]
    assert (saved["row"], saved["column"]) == (mine, "exact bias") and -1 <= low <= high <= 1
    assert f"exact bias           {low:.3f} to {high:.3f}" in capsys.readouterr().out


def test_a_line_that_names_no_row_is_damage(tmp_path):
    (tmp_path / ROWS).write_text('{"row": "none", "column": "a", "area": 1}\n{"column": "a", "area": 1}\n')
    with pytest.raises(DamagedFile, match=rf"{ROWS}, line 2: no 'row'"):
        Measured.of(row_of("none"), tmp_path)
