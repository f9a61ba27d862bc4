"""What `verl-credit bench` declares, refuses and shows; the parts have tests of their own."""

import re
from types import SimpleNamespace

import pytest

from verl_credit.cli import main
from verl_credit.errors import ConfigError, PreflightError
from verl_credit.study.bench import _rows, declare, find_candidate
from verl_credit.study.campaign.design import composed
from verl_credit.study.campaign.file import parse
from verl_credit.study.fidelity.credits import Credit
from verl_credit.study.twin_check import check_twin

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


@pytest.mark.slow  # composes three recipes
def test_the_learning_curves_are_a_campaign_of_the_twin(mine, tmp_path):
    conditions = {
        "grpo": ["algorithm.info_gain_norm_mode=none"],
        "bench_mine.mine": find_candidate(mine, {"weight": 2.0}).overrides(),
        "joint": find_candidate("joint").overrides(),
    }
    campaign = parse(declare(conditions, seeds=8, steps=15, overrides=["lab.size=tiny"]), "bench")
    assert campaign.engine == "twin" and campaign.seeds == [*range(1, 9)]
    assert campaign.pairs() == [("bench_mine.mine", "grpo"), ("bench_mine.mine", "joint")]
    configs = composed(campaign, tmp_path)
    for config in configs.values():
        check_twin(config)
        assert (config.lab.size, config.trainer.total_training_steps) == ("tiny", 15)
    assert configs["bench_mine.mine"].algorithm.turn_params == {"weight": 2.0}


REFUSED = [
    (["bench", "turn-grup"], r"did you mean turn-group\?.*expected my_module:my_mode"),
    (["bench", "nowhere:mode"], "cannot import 'nowhere'"),
    (["bench", "joint", "--params", '{"alfa": 1}'], "--params alfa.*joint has"),
    (["bench", "joint", "--beside", "grpo"], "grpo.*expected my_module:my_mode, or one of none"),
    (["bench", "joint", "seed=3"], "every run has its own seed; give seeds"),
]


@pytest.mark.parametrize("words, said", REFUSED, ids=lambda x: "")
def test_refused_in_one_line(words, said, capsys, tmp_path):
    assert main([*words, "--dir", str(tmp_path / "out")]) == 4
    told = capsys.readouterr().out
    assert told.count("\n") == 1 and re.search(said, told)


def test_a_broken_campaign_is_refused_before_anything_is_measured():
    with pytest.raises(ConfigError) as error:
        declare({"grpo": [], "joint": []}, seeds=2, steps=5, overrides=["run_dir=here"])
    assert (error.value.key, error.value.value) == ("overrides", "run_dir=here")
    assert error.value.accepted == "every run has its own run_dir; give --dir"


def test_a_candidate_without_credit_is_no_row_that_is_left_out(mine):
    missing = Credit("this run: bench_mine.mine", None, "row 3 is not finite", kind="run")
    found = SimpleNamespace(credits=[(missing, None)], gradients={})
    with pytest.raises(PreflightError, match="bench_mine:mine gave no credit: row 3 is not finite"):
        _rows(found, find_candidate(mine))
