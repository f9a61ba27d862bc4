"""`verl-credit diff` and the values of `explain`: every key that differs, grouped, and how it ends."""

import json

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from kit.recipes import load_config
from verl_credit.cli import main
from verl_credit.cli.recipe.differences import ORDER, compare, read_side
from verl_credit.config.resolved import flat_values
from verl_credit.errors import ConfigError
from verl_credit.recipe.compose import ABSENT, Default, changed_values, defaults
from verl_credit.recipe.recipe_files import verl_folder
from verl_credit.records.run.files import METRICS, VALIDATION, append_json
from verl_credit.records.run.versions import VERSIONS, installed_versions, read_versions, write_versions

VALUES = {
    "seed": 1,
    "run_dir": "a",
    "algorithm": {"gamma": 1.0, "gtpo": {"beta": 0.1}},
    "data": {"files": ["x", "y"]},
}


def run_folder(root, values=VALUES, versions=None, metrics=(), validation=()):
    root.mkdir()
    OmegaConf.save(OmegaConf.create(values), root / "config.yaml")
    if versions is not None:
        (root / VERSIONS).write_text(json.dumps(versions))
    for row in metrics:
        append_json(root / METRICS, row)
    for row in validation:
        append_json(root / VALIDATION, row)
    return str(root)


def diff(capsys, *arguments):
    code = main(["diff", *arguments])
    return code, capsys.readouterr().out


def test_equal_runs(tmp_path, capsys):
    a, b = (run_folder(tmp_path / n, VALUES | {"run_dir": n}) for n in "ab")
    code, said = diff(capsys, a, b)
    assert code == 0 and said.endswith("equal but for paths and logging\n")
    assert "  run_dir  a  ->  b   (default ???)" in said
    assert diff(capsys, a, a)[1].endswith("\n\nequal\n")


def test_runs_that_differ_are_shown_by_group_with_their_last_metrics(tmp_path, capsys):
    other = VALUES | {"seed": 2, "run_dir": "b", "data": {"files": ["x"]}, "lab": {"size": "tiny"}}
    other["algorithm"] = {"gamma": 0.9, "gtpo": {"beta": 0.1}}
    a = run_folder(
        tmp_path / "a",
        versions={"torch": "2.11.0", "verl": "0.9.1"},
        metrics=[{"step": 1, "credit/outcome/em": 0.1}, {"step": 2, "credit/outcome/em": 0.25}],
        validation=[{"step": 2, "val-aux/lab-greedy/em/mean@1": 0.5, "val-aux/lab-greedy/f1/mean@1": 0.6}],
    )
    b = run_folder(
        tmp_path / "b", other, versions={"torch": "2.13.0", "verl": "0.9.1"}, metrics=[{"step": 7}]
    )
    code, said = diff(capsys, a, b)
    assert code == 1
    headings = [line for line in said.splitlines() if line in ORDER]
    assert headings == ["credit", "data", "seeds", "versions", "paths and logging"]
    for line in (
        "  algorithm.gamma  1.0  ->  0.9   (default 1.0)",
        "  data.files  ['x', 'y']  ->  ['x']",
        f"  lab.size    {ABSENT}  ->  tiny",
        "  seed  1  ->  2   (default 1)",
        "  torch  2.11.0  ->  2.13.0",
        "  steps                         2  ->  7",
        "  credit/outcome/em             0.25  ->  -",
        "  val-aux/lab-greedy/em/mean@1  0.5  ->  -",
    ):
        assert line in said.splitlines(), said
    assert "gtpo" not in said and "f1/mean@1" not in said and "  verl  " not in said


def test_json(tmp_path, capsys):
    a, b = run_folder(tmp_path / "a"), run_folder(tmp_path / "b", VALUES | {"seed": 2})
    code, said = diff(capsys, a, b, "--json")
    found = json.loads(said)
    assert code == 1 and found["equal"] is False
    assert found["groups"] == {"seeds": [{"key": "seed", "a": 1, "b": 2, "default": 1}]}
    assert found["scores"] == {"a": {}, "b": {}}
    assert json.loads(diff(capsys, a, a, "--json")[1])["equal"] is True


@pytest.mark.slow
def test_recipes_with_overrides(capsys):
    code, said = diff(capsys, "lab", "lab algorithm.gamma=0.5 run_dir='/tmp/a b'")
    assert code == 1
    assert "  algorithm.gamma  1.0  ->  0.5   (default 1.0)" in said.splitlines()
    assert said.splitlines()[-1] == "1 values differ"  # the folder is shown and does not count
    assert "->  /tmp/a b   (default ???)" in said and "last metrics" not in said
    assert diff(capsys, "lab", "lab run_dir=elsewhere trainer.experiment_name=x")[0] == 0


@pytest.mark.parametrize(
    "text, said",
    [
        ("labb", "no recipe is called 'labb'"),
        ("lab algorithm.gama=1", "did you mean algorithm.gamma"),
        ("lab +seeed=1", "lab +seeed=1 would be refused: unknown key seeed (did you mean seed?)"),
        ("lab 'x", "No closing quotation"),
        ("", "'': no such folder; expected a run's, or a recipe"),
        ("runs/absent", "'runs/absent': no such folder"),
    ],
)
def test_what_cannot_be_read_ends_with_4_and_is_named(capsys, text, said):
    code, told = diff(capsys, text, "lab")
    assert code == 4 and said in told


@pytest.mark.parametrize(
    "name, text, said",
    [
        ("config.yaml", None, "no config.yaml there"),
        ("config.yaml", "a: [1", "config.yaml cannot be read"),
        ("config.yaml", "- 1", "holds no keys"),
        ("config.yaml", b"\xff\xfe\x00x", "config.yaml cannot be read"),
        (VERSIONS, "{", "versions.json is not JSON"),
        (VERSIONS, "[]", "expected an object"),
        (METRICS, "{\n", "metrics.jsonl line 1 is not JSON"),
    ],
)
def test_a_damaged_run_ends_with_4_and_the_file_is_named(tmp_path, capsys, name, text, said):
    a = run_folder(tmp_path / "a")
    if text is None:
        (tmp_path / "a" / name).unlink()
    else:
        (tmp_path / "a" / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    code, told = diff(capsys, a, a)
    assert code == 4 and said in told


@pytest.mark.slow
def test_a_key_on_one_side_only_and_a_default_of_null():
    sides = [read_side("lab"), read_side("lab +data.cache_dir=x data.seed=null max_hours=2")]
    found = compare(*sides, base=lambda: {"data.seed": Default(None, "verl")})
    rows = {row.key: row for rows in found.values() for row in rows}
    assert rows["data.cache_dir"] == ("data.cache_dir", ABSENT, "x", ABSENT)
    assert (rows["data.seed"].b, rows["data.seed"].default) == (None, None)
    assert (rows["max_hours"].a, rows["max_hours"].b) == (None, 2)


def test_versions_travel_with_a_run(tmp_path):
    write_versions(tmp_path)
    assert read_versions(tmp_path) == installed_versions()
    assert {"python", "torch", "verl"} <= set(installed_versions())
    assert read_versions(tmp_path / "absent") is None


# --- the values of explain -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_defaults_are_those_that_hydra_composes_of_verls_files_and_ours():
    known = defaults()
    with initialize_config_dir(str(verl_folder()), version_base=None):
        composed = flat_values(compose("ppo_trainer"))
    assert {key: default.value for key, default in known.items() if default.of == "verl"} == composed
    assert known["search.topk"] == (3, "verl_credit")
    assert known["run_dir"] == ("???", "verl_credit")


@pytest.mark.slow
def test_every_changed_value_is_listed_and_no_other():
    config = load_config("lab", ["algorithm.gtpo.beta=0.7", "data.train_batch_size=1024"])
    changed = {key: (value, default) for key, value, default in changed_values(config)}
    assert changed["algorithm.gtpo.beta"] == (0.7, Default(0.1, "verl_credit"))
    assert changed["lab.size"] == ("full", Default(ABSENT, "the recipe"))
    assert "data.train_batch_size" not in changed  # set to what verl has
    values, known = flat_values(config), defaults()
    for key, value in values.items():
        assert (key in changed) == (value != known.get(key, Default(ABSENT, "")).value)


@pytest.mark.slow
def test_a_side_that_is_no_folder_is_a_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_side("lab").scores is None
    (tmp_path / "lab").mkdir()
    assert read_side("lab").scores is None
    with pytest.raises(ConfigError, match="no config.yaml there"):
        read_side("./lab")
    run_folder(tmp_path / "mine")
    assert read_side("mine").scores == {}
