"""A campaign's file: what is refused before the first run, by file, key and value, and which runs it declares."""

from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from kit.each import each
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


@each(
    "changes, key, value, accepted",
    [
        ({"sedes": [1]}, "sedes", None, ["name", "hypothesis", "expected_delta"]),
        ({"metric": {"name": "x", "windows": [0, 1]}}, "metric.windows", None, ["name", "window"]),
        ({"hypothesis": "absent"}, "hypothesis", None, "expected what is expected and why, in prose"),
        ({"metric": {"name": "x"}}, "metric.window", None, "expected [FIRST, LAST] step"),
        ({"seeds": [1, -2]}, "seeds.1", -2, "expected a list of whole numbers"),
        ({"seeds": "1, 2"}, "seeds", "1, 2", "expected a list of whole numbers"),
        ({"seeds": [1, 2, 1]}, "seeds", 1, "it stands there twice"),
        ({"worlds": []}, "worlds", [], "expected at least one, or null"),
        ({"conditions": {"a": []}}, "conditions", {"a": []}, "expected at least two names (letters, digits, ._+-)"),
        ({"conditions": {"a/b": [], "c": []}}, "conditions.a/b", [], "expected at least two names (letters, digits, ._+-)"),
        ({"conditions": {"a": "x=1", "b": []}}, "conditions.a", "x=1", "expected at least two names"),
        ({"baseline": "grop"}, "baseline", "grop", "expected a condition (did you mean grpo?): grpo, joint, separate"),
        ({"budget": {"hours": 0.0}}, "budget.hours", 0.0, "expected no run starts after"),
        ({"stop": {"max_failures": 0}}, "stop.max_failures", 0, "expected no run starts after so many failed"),
        (
            {"metric": {**GOOD["metric"], "window": [30, 30]}},
            "metric.window", [30, 30], "expected a first step of at least 0",
        ),
        (
            {"metric": {"name": "critic/score/mean", "window": [0, 9]}},
            "metric.window", [0, 9], "expected a first step of at least 1",
        ),
        ({"overrides": ["seed=3"]}, "overrides", "seed=3", "every run has its own seed; give seeds"),
        (
            {"conditions": {**GOOD["conditions"], "joint": ["run_dir=x"]}},
            "conditions.joint", "run_dir=x", "every run has its own run_dir; give --dir",
        ),
        ({"comparisons": [["grpo", "grpo"]]}, "comparisons", ["grpo", "grpo"], "expected two different conditions [A, B]"),
        (
            {"comparisons": [["grpo", "joint"], ["joint", "grpo"]]},
            "comparisons", ["joint", "grpo"], "this pair is declared twice",
        ),
        ({"comparisons": [["grpo", "jiont"]]}, "comparisons", "jiont", "expected a condition (did you mean joint?)"),
        ({"comparisons": []}, "comparisons", [], "expected at least one pair"),
        ({"comparisons": "every"}, "comparisons", "every", "expected baseline (each condition against it), all"),
        (
            {"factors": {"a": {"x": ["grpo"], "y": ["joint", "separate"]}}},
            "factors", ["a"], "a factorial has at least two factors",
        ),
        (
            {"factors": {"a": {"x": ["grpo"], "y": ["joint"]}, "b": {"x": ["grpo"], "y": ["joint", "separate"]}}},
            "factors.a", {"x": ["grpo"], "y": ["joint"]}, "expected two levels or more, and every condition in exactly one",
        ),
        (
            {"factors": {f: {"x": ["grpo"], "y": ["joint", "separate"]} for f in "ab"}},
            "factors", "separate", "it has the same levels as joint: y, y",
        ),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_by_key_and_value(changes, key, value, accepted):
    with pytest.raises(ConfigError) as error:
        campaign(**changes)
    assert (error.value.key, error.value.value) == (key, value)
    assert error.value.accepted[: len(accepted)] == accepted
    assert str(error.value).startswith("f.yaml: ")
    assert key != "sedes" or "did you mean seeds?" in str(error.value)


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


def test_all_conditions_of_a_block_come_before_the_next_block():
    folders = [run.folder for run in planned(campaign())]
    assert len(folders) == 12 == len(set(folders))
    assert [folder.partition("/")[0] for folder in folders] == ["grpo", "joint", "separate"] * 4
    assert folders[2:4] == ["separate/seed-1-world-0", "grpo/seed-2-world-0"]
    assert planned(campaign(worlds=None))[0].folder == "grpo/seed-1"


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes, key, value, accepted, where",
    [
        (
            {"conditions": {**GOOD["conditions"], "joint": ["algorithm.info_gain_norm_mode=jiont"]}},
            "algorithm.info_gain_norm_mode", "jiont", ["none", "joint"], r"condition joint: .*did you mean joint\?",
        ),
        (
            {"conditions": {**GOOD["conditions"], "joint": ["algorithm.info_gain_norm_mode=joint,none"]}},
            "", None, "", "^campaign mine, condition joint: .*algorithm.info_gain_norm_mode=joint,none",
        ),
        (
            {"conditions": {**GOOD["conditions"], "again": ["algorithm.info_gain_norm_mode=none"]}},
            "conditions", "again", "", "conditions grpo and again are the same configuration",
        ),
        (
            {"metric": {**GOOD["metric"], "window": [0, 31]}},
            "metric.window", "[0, 31]", "the run ends at trainer.total_training_steps=30", "condition grpo: ",
        ),
        (
            {"overrides": ["trainer.val_before_train=false", "trainer.test_freq=10"]},
            "metric.window", "[0, 30]", "the first evaluation is at step 10", "condition grpo: ",
        ),
        (
            {"overrides": ["trainer.default_local_dir=/tmp/all"]},
            "trainer.default_local_dir", Path("/tmp/all"), "the runs of condition grpo would share their checkpoints", None,
        ),
        ({"recipe": "math_sepa"}, "worlds", [0, 3], "recipe math_sepa has no lab, and so no worlds", None),
        (
            {"recipe": "math_sepa", "worlds": None, "overrides": []},
            "", None, "", "condition grpo: .*no value for data.train_files",
        ),
        ({"recipe": "labb"}, "", "labb", ["doorkey", "lab"], r"no recipe is called 'labb' \(did you mean lab\?\)"),
    ],
)  # fmt: skip
def test_a_bad_condition_is_refused_by_its_name(changes, key, value, accepted, where, tmp_path):
    with pytest.raises(ConfigError, match=where) as error:
        composed(campaign(**changes), tmp_path)
    assert (error.value.key, error.value.value) == (key, value)
    assert error.value.accepted[: len(accepted)] == accepted
    assert not list(tmp_path.iterdir())
