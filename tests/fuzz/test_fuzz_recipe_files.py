"""Recipes of one's own with damaged YAML: they are composed, or refused in lines that name file or key."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import yaml
from omegaconf import DictConfig

from kit.damage import damaged_bytes, damaged_value, written
from kit.fuzz import ACCEPTED, REFUSED, checker_of, contents, cuts, told, try_all
from verl_credit.errors import ConfigError
from verl_credit.recipe.compose import unchecked_config

# Of a small recipe: to compose a shipped one takes seconds, whichever file of one's own is damaged.
BASE = {
    "run_dir": "runs/x",
    "seed": 1,
    "algorithm": {"info_gain_norm_mode": "none"},
    "data": {},
    "trainer": {},
    "actor_rollout_ref": {},
    "own": {"a": 1},
}
GOOD = {
    "defaults": ["base", {"override part": "two"}, "_self_"],
    "seed": 7,
    "algorithm": {"gamma": 0.9, "info_gain_norm_mode": "${own.mode}"},
    "own": {"mode": "joint", "list": [1, 2, {"x": "y"}]},
    "run_dir": "runs/${seed}",
}
# fmt: off
ODD = (
    None, True, 0, -1, 2**63, 10**400, 0.5, float("nan"), float("inf"), "", " ", "text", "a\nb", "\x1b[31m", "é" * 100,
    "\u202e",
    "x" * 50_000, "${nothing}", "${seed}", "${own}", "${run_dir}", "${", "???", "base", "mine", "_self_", "nowhere",
    "/base", "../x",
    "part: one", [], [None], ["base"], ["mine"], [1], [{"part": "three"}], [{"override nothing": "two"}], [{"part": None}],
    [{"part": ["one", "two"]}], ["base", "base"], {}, {"a": 1}, {1: 2}, {"a": {"b": {"c": []}}}, {"_target_": "os.system"},
)
# fmt: on


def make(seed: int) -> tuple[list[str], dict, bool]:
    """(what was done, the recipe, whether its text is damaged, too)"""
    draw, tree = random.Random(seed), copy.deepcopy(GOOD)
    done = [damaged_value(tree, draw, ODD) for _ in range(draw.choice((0, 1, 1, 2)))]
    return done, tree, draw.random() < 0.4


def write(folder: Path) -> None:
    (folder / "part").mkdir()
    base = {"defaults": [{"part": "one"}, "_self_"], **BASE}
    (folder / "base.yaml").write_text(yaml.safe_dump(base, sort_keys=False))
    for name in ("one", "two"):
        (folder / "part" / f"{name}.yaml").write_text(f"# @package _global_\nchosen: {name}\n")


def law(folder: Path, tree: dict) -> str:
    before = contents(folder)
    try:
        config = unchecked_config("mine", [], str(folder))  # the recipe is too small to train
    except ConfigError as error:
        said = str(error)
        for line in said.splitlines() or [""]:  # one refusal each
            assert line.isprintable() and line, f"not one line: {said!r:.600}"
        words = ("mine", "base", *map(str, tree), "defaults", "part")
        assert any(word in said for word in words), f"names neither file nor key: {said!r:.600}"
        return REFUSED
    finally:
        assert contents(folder) == before
    assert isinstance(config, DictConfig)
    return ACCEPTED


@checker_of
def checker(folder: Path, seed: int) -> str:
    (done, tree, damaged), draw = make(seed), random.Random(-seed - 1)
    write(folder)
    text = written(tree, draw)
    (folder / "mine.yaml").write_bytes(damaged_bytes(text, draw)[1] if damaged else text)
    with told((done, tree, (folder / "mine.yaml").read_bytes() if damaged else "")):
        return law(folder, tree)


@cuts(8, failed=(575, 1587, 2312))
def test_a_recipe_of_ones_own_is_composed_or_refused_in_one_line(seeds, tmp_path):
    with checker(tmp_path) as check:
        try_all(check, seeds)
