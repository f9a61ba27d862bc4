"""Recipes from a folder of the user's beside the shipped ones: the lines of the page, and refusals in one line."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from kit.recipes import load_config
from verl_credit.cli import main
from verl_credit.cli.train import start
from verl_credit.errors import ConfigError
from verl_credit.recipe.doctor import checks
from verl_credit.recipe.recipe_files import recipes_folder, shipped_recipes
from verl_credit.recipe.rules import validate

PAGE = (
    (Path(__file__).parents[2] / "docs" / "recipes.md")
    .read_text()
    .partition("## A recipe of your own")[2]
    .partition("\n## ")[0]
)
(RECIPE,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = re.findall(r"^verl-credit .*$", PAGE, re.MULTILINE)

pytestmark = pytest.mark.slow  # every file of one's own is composed anew


def write(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return str(folder)


@pytest.fixture
def started(monkeypatch):
    """The configurations that `train` would start."""
    found = []
    monkeypatch.setattr(start, "recorded", lambda config, *rest: found.append(config) or 0)
    monkeypatch.setattr(start, "set_environment", lambda config: None)
    monkeypatch.setattr(checks, "examine", lambda context, first: found.append(context.config) or first)
    return found


@pytest.mark.parametrize("line", COMMANDS)
def test_the_lines_of_the_page_work(line, tmp_path, monkeypatch, started, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_recipes").mkdir()
    write(tmp_path / "my_recipes", mine=RECIPE)
    _, command, *rest = shlex.split(line)
    code, said = main([command, *rest]), capsys.readouterr().out
    assert code == (1 if command == "diff" else 0), said  # diff: the two differ
    if command in ("explain", "diff", "plan"):
        assert "mine" in said and ("lab" in said or command == "explain")
    else:
        (config,) = started
        assert (config.run_dir, config.seed, config.search.topk) == ("runs/mine", 7, 5)
        assert (config.credit_preset, config.data.train_batch_size) == ("grpo", 8)


def test_shipped_recipes_and_groups_stay_visible_and_ones_own_come_first(tmp_path):
    (tmp_path / "hardware").mkdir()
    header = "# @package _global_\ndefaults: [laptop]\n"
    write(tmp_path / "hardware", mybox=header + "hardware: {cores: 3}\n")
    own = write(tmp_path, lab="defaults: [search_cpu, _self_]\nrun_dir: mine\n")
    assert load_config("lab", [], own).run_dir == "mine"
    assert load_config("math_sepa", [], own) == load_config("math_sepa")
    assert load_config("math_sepa", ["hardware=mybox"], own).hardware.cores == 3
    write(tmp_path / "hardware", node8="# @package _global_\nhardware: {cores: 5}\n")
    assert load_config("multihop_qwen3_4b", [], own).hardware.cores == 5


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_can_be_copied_and_started_from(name, tmp_path):
    own = write(
        tmp_path,
        copied=(recipes_folder() / f"{name}.yaml").read_text(),
        mine=f"defaults: [{name}]\nseed: 9\n",
    )
    assert load_config("copied", [], own) == load_config(name)
    config = load_config(name)
    config.seed = 9
    assert load_config("mine", [], own) == config


def test_values_of_the_recipe_win_over_a_preset_and_are_listed(tmp_path):
    own = write(
        tmp_path, mine="defaults: [lab, _self_]\nalgorithm: {info_gain_norm_mode: separate, gamma: 0.5}\n"
    )
    config = load_config("mine", ["credit=grpo"], own)
    listed = ["algorithm.info_gain_norm_mode=separate"]
    assert config.algorithm.info_gain_norm_mode == "separate" and config.credit_overrides == listed


NOT_READ = [  # (what stands in the file, the line that is named, what is said)
    ("defaults: [lab]\nsearch:\n\ttopk: 3\n", 3, "indent with spaces"),
    ("defaults: [lab]\nsearch: {topk: 3\nseed: 3\n", 3, "expected ',' or '}'"),
    ("defaults: [lab]\nseed: 3\nrun_dir: x\nseed: 4\n", 4, "duplicate key seed"),
    ("seed: 3\ndefaults:\n  - mine\n", 3, "leads back to this file"),
    ("defaults:\n  - other\n  - _self_\n", 2, "leads back to this file"),
]


@pytest.mark.parametrize("text, line, said", NOT_READ, ids=lambda x: "")
def test_a_file_that_cannot_be_read_is_named_with_its_line(text, line, said, tmp_path, capsys):
    own = write(tmp_path, mine=text, other="# a circle\ndefaults: [mine]\n")
    assert main(["explain", "--config-dir", own, "--config-name", "mine"]) == 4
    told = capsys.readouterr().out
    file = "other" if "other" in text else "mine"
    assert told.count("\n") == 1 and said in told
    assert f"{own}/{file}.yaml, line {line}: " in told


def refused(name, overrides, own):
    with pytest.raises(ConfigError) as caught:
        validate(load_config(name, overrides, own))
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_recipe_or_choice_that_is_nowhere_is_told_with_those_of_both_folders(tmp_path):
    own = write(tmp_path, mine="defaults: [lab]\n", typo="defaults: [labb]\n", bare="seed: 3\n")
    error = refused("mien", [], own)
    assert error.value == "mien" and error.accepted == ["bare", "mine", "typo", *shipped_recipes()]
    assert "did you mean mine?" in str(error) and f"in {own}: bare, mine, typo" in str(error)
    error = refused("typo", [], own)
    assert (error.key, error.value) == ("defaults", "labb") and "did you mean lab?" in str(error)
    error = refused("mine", ["hardware=lapto"], own)
    assert (error.key, error.value) == ("hardware", "lapto") and "laptop" in error.accepted
    assert "defaults: [lab, _self_]" in str(refused("bare", [], own))


def test_a_file_that_is_nested_too_deeply_or_names_too_long_a_file_is_named(tmp_path):
    values = {"deep": "[" * 3000 + "]" * 3000, "open": "[" * 3000}
    texts = {name: f"defaults: [lab]\nsearch: {value}\n" for name, value in values.items()}
    own = write(tmp_path, **texts, long=f"defaults: [{'x' * 300}, long]\n")
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)  # Python's own; libraries raise it
    try:
        assert "nested too deeply" in str(refused("deep", [], own))
        assert f"{own}/open.yaml" in str(refused("open", [], own))
    finally:
        sys.setrecursionlimit(limit)
    assert f"{own}/long.yaml, line 1: defaults list 'long', which leads back" in str(refused("long", [], own))


NO_SECTION = ("algorithm", "data", "search", "reward", "ray_kwargs", "actor_rollout_ref")
OF_A_ROLE = ("actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.actor.optim")


@pytest.mark.parametrize("key", [*NO_SECTION, *OF_A_ROLE])
def test_a_value_where_a_section_belongs_is_refused(key, tmp_path):
    *parents, leaf = key.split(".")
    text = "".join(f"{parent}: {{" for parent in parents) + f"{leaf}: 3" + "}" * len(parents)
    error = refused("mine", [], write(tmp_path, mine=f"defaults: [lab, _self_]\n{text}\n"))
    assert (error.key, error.value) == (key, 3) and "section with keys" in error.accepted


LAB = "defaults: [lab, _self_]\n"


@pytest.mark.parametrize(
    "text, said",
    [
        (f"{LAB}run_dir: ${{x", "${x"),
        (f"{LAB}1: 2", "unknown key 1"),
        (f"{LAB}\xff", "mine"),
        ("defaults: [{override nothing: two}]", "In 'mine': Could not override 'nothing'"),
        (f"defaults: [{'x' * 300}]", "recipe mine cannot be composed (OSError: File name too long)"),
        ("defaults: [lab, {1: x}]", "expected NAME, GROUP: CHOICE, or _self_ by itself in its defaults"),
        ("defaults: [{override nothing: _self_}]\nseed: 7", "recipe mine cannot be composed"),
    ],
    ids=lambda x: "",
)
def test_what_else_is_wrong_in_a_file_is_told_in_one_line(text, said, tmp_path):
    own = write(tmp_path, mine="")
    (tmp_path / "mine.yaml").write_bytes(f"{text}\n".encode("latin-1"))
    assert said in str(refused("mine", [], own))


def test_a_choice_that_is_no_text_is_named():
    assert "hardware=[1]" in str(refused("lab", ["hardware=[1]"], None))
