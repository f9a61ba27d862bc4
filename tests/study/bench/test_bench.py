"""The candidate of `verl-credit bench`, and what the command refuses; the columns have tests of their own."""

import re

import pytest

from verl_credit.cli import main
from verl_credit.study.bench import find_candidate

MINE = "def mine(tables, *, weight: float = 1.0):\n    return tables.reward_B_K * weight, tables.outcome_B, tables.ones()\n"


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "bench_mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "bench_mine:mine"


def test_options_are_handed_to_every_part(mine):
    candidate = find_candidate(mine, {"weight": 2.0})
    mode = "algorithm.info_gain_norm_mode=bench_mine.mine"
    assert candidate.overrides() == [mode, "+algorithm.turn_params.weight=2.0"]
    assert candidate.exact().run.keywords["weight"] == 2.0
    shipped = find_candidate("turn-group-unbiased", {"alpha": 1.0})
    assert shipped.overrides()[1] == "algorithm.adv_rescale_alpha=1.0"


REFUSED = [
    (["bench", "turn-grup"], r"did you mean turn-group\?.*expected my_module:my_mode"),
    (["bench", "nowhere:mode"], "cannot import 'nowhere'"),
    (["bench", "joint", "--params", '{"alfa": 1}'], "--params alfa.*joint has"),
]


@pytest.mark.parametrize("words, said", REFUSED, ids=lambda x: "")
def test_refused_in_one_line(words, said, capsys, tmp_path):
    assert main([*words, "--dir", str(tmp_path / "out")]) == 4
    told = capsys.readouterr().out
    assert told.count("\n") == 1 and re.search(said, told)
