"""A campaign may grow; what its runs were started for does not change under them."""

import json

import pytest
from omegaconf import OmegaConf

from verl_credit.errors import ConfigError
from verl_credit.study.campaign.file import parse
from verl_credit.study.campaign.record import keep_record, read_record

F, G = {"x": ["grpo", "joint"], "y": ["both", "none"]}, {"x": ["grpo", "both"], "y": ["joint", "none"]}
TREE = {
    "name": "mine",
    "hypothesis": "joint is faster",
    "recipe": "lab",
    "overrides": ["search.topk=3"],
    "conditions": {"grpo": ["a=1"], "joint": ["a=2"], "both": ["a=3"], "none": ["a=4"]},
    "baseline": "grpo",
    "seeds": [1, 2],
    "metric": {"name": "val-x", "window": [0, 30]},
    "factors": {"f": F, "g": G},
}


def keep(folder, ended=0, configs=None, **changes):
    return keep_record(folder, parse({**TREE, **changes}, "f.yaml"), configs or {}, ended)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"hypothesis": "GRPO is faster"}, "hypothesis was 'joint is faster' and is 'GRPO is faster'"),
        ({"seeds": [1]}, "seed 2 is gone"),
        ({"baseline": "joint"}, "baseline was 'grpo' and is 'joint'"),
        ({"overrides": ["search.topk=2"]}, "overrides was ['search.topk=3'] and is ['search.topk=2']"),
        ({"worlds": [0]}, "worlds was None and is [0]"),
        ({"metric": {"name": "val-x", "window": [0, 20]}}, "metric was Metric(name='val-x', window=[0, 30]"),
        (
            {"conditions": TREE["conditions"] | {"joint": ["a=5"]}},
            "condition joint was ['a=2'] and is ['a=5']",
        ),
        (
            {"comparisons": [["joint", "grpo"]]},
            "comparison both against grpo is gone; comparison none against",
        ),
        ({"factors": {"f": G, "g": F}}, "factor f was {'grpo': 'x', 'joint': 'x'"),
        ({"factors": None}, "factor f is gone; factor g is gone"),
        ({"engine": "twin"}, "engine was 'train' and is 'twin'"),
        (
            {"conditions": {"grpo": ["a=1"], "joint": ["a=2"]}, "factors": None},
            "condition both is gone; condition none is gone",
        ),
    ],
)
def test_what_runs_were_started_for_does_not_change_under_them(tmp_path, changes, said):
    keep(tmp_path)
    before = (tmp_path / "campaign.json").read_bytes()
    with pytest.raises(ConfigError) as caught:
        keep(tmp_path, **changes)
    assert said in str(caught.value)
    assert (tmp_path / "campaign.json").read_bytes() == before


def test_budget_stop_and_order_can_change(tmp_path):
    keep(tmp_path)
    turned = dict(reversed(TREE["conditions"].items()))
    assert keep(tmp_path, budget={"runs": 3}, stop={"max_failures": 1}, seeds=[2, 1], conditions=turned) == []
    assert read_record(tmp_path).campaign.budget.runs == 3 and read_record(tmp_path).added == []


def test_what_is_added_is_recorded(tmp_path):
    keep(tmp_path, worlds=[0])
    assert keep(tmp_path, ended=4, seeds=[1, 2, 3], worlds=[5, 0]) == ["seed 3", "world 5"]
    assert keep(tmp_path, ended=9, seeds=[1, 2, 3], worlds=[5, 0], comparisons="all")
    first, second = read_record(tmp_path).added
    assert (first["what"], first["ended"]) == ("seed 3; world 5", 4)
    assert second["what"].startswith("comparison both against joint;") and second["ended"] == 9


def config(**keys):
    found = {"run_dir": "r", "seed": 1, "algorithm": {"gamma": 1.0}, "lineage": {"dir": "x"}, **keys}
    return OmegaConf.create(found)


def test_a_recipe_that_changed_is_noticed(tmp_path):
    keep(tmp_path, configs={"joint": config()})
    other = config(run_dir="elsewhere", seed=2, lineage={"dir": "y"}, new=1)
    assert keep(tmp_path, configs={"joint": other}) == []
    with pytest.raises(ConfigError, match="condition joint: algorithm.gamma was 1.0 and is 0.5"):
        keep(tmp_path, configs={"joint": config(algorithm={"gamma": 0.5})})
    with pytest.raises(ConfigError, match="algorithm.gamma was 1.0 and is None"):
        keep(tmp_path, configs={"joint": config(algorithm={"other": 0.5})})


def test_a_damaged_record_is_not_written_over(tmp_path):
    keep(tmp_path)
    (tmp_path / "campaign.json").write_text("{")
    with pytest.raises(ConfigError, match="campaign.json is damaged"):
        keep(tmp_path)
    assert (tmp_path / "campaign.json").read_text() == "{"


def test_secrets_are_hidden(tmp_path):
    secret = ["search.url=http://me:secret@127.0.0.1:1", "+data.api_key=secret"]
    keep(tmp_path, overrides=secret, configs={"joint": config(search={"token": "secret"})})
    written = "".join(path.read_text() for path in tmp_path.rglob("*.json"))
    assert "secret" not in written
    shown = json.loads((tmp_path / "campaign.json").read_text())["campaign"]["overrides"]
    assert shown == ["search.url=http://***@127.0.0.1:1", "+data.api_key=***"]
    assert keep(tmp_path, overrides=secret) == []
