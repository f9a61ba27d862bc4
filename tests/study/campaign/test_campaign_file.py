"""A campaign's file: what is refused before the first run, by file, key and value, and which runs it declares."""

import re

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from verl_credit.errors import ConfigError
from verl_credit.study.campaign.design import composed, overrides_of, planned
from verl_credit.study.campaign.file import parse, read_campaign

GOOD = {
    "name": "mine",
    "hypothesis": "joint is faster",
    "recipe": "lab",
    "overrides": ["lab.size=tiny", "trainer.test_freq=5"],
    "conditions": {
        "grpo": ["algorithm.info_gain_norm_mode=none"],
        "joint": ["algorithm.info_gain_norm_mode=joint"],
        "separate": ["algorithm.info_gain_norm_mode=separate"],
    },
    "baseline": "grpo",
    "seeds": [1, 2],
    "worlds": [0, 3],
    "metric": {"name": "val-aux/lab-sampled/em/mean@1", "window": [0, 30]},
}


def campaign(**changes):
    return parse({key: value for key, value in {**GOOD, **changes}.items() if value != "absent"}, "f.yaml")


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"sedes": [1]}, "f.yaml: unknown key sedes (did you mean seeds?): accepted are name, hypothesis, expected_delta"),
        ({"metric": {"name": "x", "windows": [0, 1]}}, "unknown key metric.windows (did you mean window?)"),
        ({"hypothesis": "absent"}, "f.yaml: hypothesis is missing: expected what is expected and why, in prose"),
        ({"metric": {"name": "x"}}, "metric.window is missing: expected [FIRST, LAST] step"),
        ({"seeds": [1, -2]}, "f.yaml: seeds.1=-2: expected a list of whole numbers"),
        ({"seeds": "1, 2"}, "seeds='1, 2': expected a list of whole numbers"),
        ({"seeds": [1, 2, 1]}, "f.yaml: seeds=1: it stands there twice"),
        ({"worlds": []}, "worlds=[]: expected at least one, or null"),
        ({"conditions": {"a": []}}, "expected at least two names"),
        ({"conditions": {"a/b": [], "c": []}}, "expected at least two names (letters, digits, ._+-)"),
        ({"conditions": {"a": "x=1", "b": []}}, "conditions.a='x=1': expected at least two names"),
        ({"baseline": "grop"}, "baseline=grop: expected a condition (did you mean grpo?): grpo, joint, separate"),
        ({"budget": {"hours": 0.0}}, "budget.hours=0.0: expected no run starts after"),
        ({"stop": {"max_failures": 0}}, "stop.max_failures=0: expected no run starts after so many failed"),
        ({"metric": {**GOOD["metric"], "window": [30, 30]}}, "metric.window=[30, 30]: expected a first step of at least 0"),
        ({"metric": {"name": "critic/score/mean", "window": [0, 9]}}, "a first step of at least 1"),
        ({"overrides": ["seed=3"]}, "overrides=seed=3: every run has its own seed; give seeds"),
        (
            {"conditions": {**GOOD["conditions"], "joint": ["run_dir=x"]}},
            "conditions.joint=run_dir=x: every run has its own run_dir; give --dir",
        ),
        ({"comparisons": [["grpo", "grpo"]]}, "expected two different conditions [A, B]"),
        ({"comparisons": [["grpo", "joint"], ["joint", "grpo"]]}, "this pair is declared twice"),
        ({"comparisons": [["grpo", "jiont"]]}, "comparisons=jiont: expected a condition (did you mean joint?)"),
        ({"comparisons": []}, "expected at least one pair"),
        ({"comparisons": "every"}, "comparisons='every': expected baseline (each condition against it), all"),
        ({"factors": {"a": {"x": ["grpo"], "y": ["joint", "separate"]}}}, "a factorial has at least two factors"),
        (
            {"factors": {"a": {"x": ["grpo"], "y": ["joint"]}, "b": {"x": ["grpo"], "y": ["joint", "separate"]}}},
            "expected two levels or more, and every condition in exactly one",
        ),
        (
            {"factors": {f: {"x": ["grpo"], "y": ["joint", "separate"]} for f in "ab"}},
            "factors=separate: it has the same levels as joint: y, y",
        ),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_by_key_and_value(changes, said):
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        campaign(**changes)
    assert str(caught.value).startswith("f.yaml: ")


def test_files(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(GOOD | {"config_dir": "own"}))
    found, path = read_campaign(str(file))
    assert path == file and found.config_dir == str(tmp_path / "own")  # from the file on
    file.write_text("name: a\nname: b\n")
    with pytest.raises(ConfigError, match=r"mine.yaml, line 2: found duplicate key name"):
        read_campaign(str(file))
    file.write_bytes(b"name: \xff\n")
    with pytest.raises(ConfigError, match="mine.yaml cannot be read"):
        read_campaign(str(file))
    file.write_text("- a\n")
    with pytest.raises(ConfigError, match="expected a mapping with the keys name, hypothesis"):
        read_campaign(str(file))
    with pytest.raises(ConfigError, match=r"no shipped campaign \(did you mean turn_modes_lab\?\)"):
        read_campaign("turn_mode_lab")
    assert read_campaign("turn_modes_lab")[0].name == "turn_modes_lab"


def test_no_object_is_made_from_a_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("name: !!python/object/apply:os.system ['touch " + str(tmp_path / "made") + "']\n")
    with pytest.raises(ConfigError, match="could not determine a constructor"):
        read_campaign(str(file))
    assert not (tmp_path / "made").exists()


def test_declared_comparisons():
    assert campaign().pairs() == [("joint", "grpo"), ("separate", "grpo")]
    assert campaign(comparisons="all").pairs() == [
        ("joint", "grpo"),
        ("separate", "grpo"),
        ("separate", "joint"),
    ]
    assert campaign(comparisons=[["joint", "separate"]]).pairs() == [("joint", "separate")]


def test_all_conditions_of_a_block_come_before_the_next_block():
    folders = [run.folder for run in planned(campaign())]
    assert len(folders) == 12 == len(set(folders))
    assert [folder.partition("/")[0] for folder in folders] == ["grpo", "joint", "separate"] * 4
    assert folders[2:4] == ["separate/seed-1-world-0", "grpo/seed-2-world-0"]
    assert planned(campaign(worlds=None))[0].folder == "grpo/seed-1"


def test_a_runs_overrides_are_read_back_by_hydra(tmp_path):
    from kit.recipes import load_config

    folder = tmp_path / "a=1,b c"
    one = planned(campaign())[-1]
    config = load_config("lab", overrides_of(campaign(), one, folder))
    assert (config.seed, config.lab.world_seed, config.algorithm.info_gain_norm_mode) == (2, 3, "separate")
    assert config.run_dir == str(folder / "separate/seed-2-world-3")


def test_a_run_says_which_trial_it_is(tmp_path):
    odd = campaign(
        hypothesis="it's \\ more,\n 'really'=1 ", expected_delta="+0.5 pp", overrides=["lineage.dir=mine"]
    )
    run = planned(odd)[0]
    parsed = OverridesParser.create().parse_overrides(overrides_of(odd, run, tmp_path))
    values = {one.key_or_group: one.value() for one in parsed}  # the last of two counts, as in Hydra
    values = {key: getattr(value, "text", value) for key, value in values.items()}
    assert values["lineage.hypothesis"] == "it's \\ more, 'really'=1"
    assert values["lineage.expected_delta"] == "+0.5 pp" and values["lineage.dir"] == "mine"
    assert values["lineage.exp_id"] == "mine-grpo-seed-1-world-0"


@pytest.mark.parametrize(
    "changes, said",
    [
        (
            {"conditions": {**GOOD["conditions"], "joint": ["algorithm.info_gain_norm_mode=jiont"]}},
            "campaign mine, condition joint: algorithm.info_gain_norm_mode='jiont' (did you mean joint?)",
        ),
        (
            {"conditions": {**GOOD["conditions"], "joint": ["algorithm.info_gain_norm_mode=joint,none"]}},
            "condition joint:",
        ),
        (
            {"conditions": {**GOOD["conditions"], "again": ["algorithm.info_gain_norm_mode=none"]}},
            "conditions grpo and again are the same configuration",
        ),
        (
            {"metric": {**GOOD["metric"], "window": [0, 31]}},
            "metric.window=[0, 31]: the run ends at trainer.total_training_steps=30",
        ),
        (
            {"overrides": ["trainer.val_before_train=false", "trainer.test_freq=10"]},
            "metric.window=[0, 30]: the first evaluation is at step 10",
        ),
        (
            {"overrides": ["trainer.default_local_dir=/tmp/all"]},
            "trainer.default_local_dir=/tmp/all: the runs of condition grpo would share their checkpoints",
        ),
        ({"recipe": "math_sepa"}, "recipe math_sepa has no lab, and so no worlds"),
        ({"recipe": "math_sepa", "worlds": None, "overrides": []}, "no value for data.train_files"),
        ({"recipe": "labb"}, "no recipe is called 'labb' (did you mean lab?)"),
    ],
)
def test_a_bad_condition_is_refused_by_its_name(changes, said, tmp_path):
    with pytest.raises(ConfigError, match=re.escape(said)):
        composed(campaign(**changes), tmp_path)
    assert not list(tmp_path.iterdir())
