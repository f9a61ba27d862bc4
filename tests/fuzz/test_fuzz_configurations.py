"""Mutated recipes: each composes and is explained, or is refused with one line that names the key. Nothing else happens."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from kit.fuzz import ACCEPTED, REFUSED, checker_of, cuts, told, try_all
from kit.recipes import OWN, load_config
from verl_credit.cli.recipe.stages import explanation
from verl_credit.config.keys import OURS, VERLS, keys_of
from verl_credit.errors import ConfigError, ConfigErrors, printable
from verl_credit.recipe.recipe_files import shipped_recipes
from verl_credit.recipe.rules import validate
from verl_credit.recipe.rules.known import REWARD
from verl_credit.recipe.world import DATA, MODEL, missing_line
from verl_credit.records.run.state import nothing_left

LONG, DEEP = "x" * 300, {"a": {"b": [{"c": None}]}}
# fmt: off
NUMBERS = (0, 1, 2, 7, -1, -(2**62), 2**63, 10**400, 0.5, -0.5, 1e-300, 1e308, float("nan"), float("inf"), float("-inf"))
TEXTS = (
    "", " ", "abc", "true", "1", "1e3", "auto", "null", "none", LONG, "é" * 200, "/".join(["x" * 200] * 20), "a\nb", "a\tb",
    "\x00", "\x1b[31m", "\ud800", "'", '"', "{", "a: b", "a,b", "os.system", "os:abort", "no.such", ":", ".", "~no_one/x",
    "~", "/", "/dev/null/x", "http://", "http://x:99999", "http://[", "http://a,http://b", "???", "${nothing.there}",
    "${seed}", "${oc.env:NOT_SET_AT_ALL}", "${no_such_resolver:1}", "${trainer}", "${run_dir}/${run_dir}",
)
VALUES = (*NUMBERS, *TEXTS, None, True, False, [], [1], ["a"], [None], [[1], {"a": 1}], {}, {"a": 1}, {1: 2}, DEEP)
WRITTEN = (  # as they stand behind KEY= on the command line
    "1", "-1", "1e400", "nan", "inf", "-inf", "9" * 30, "9" * 400, "0x10", "1_000", "null", "true", "yes", "abc", LONG, "",
    "''", "'a b'", "\"a'b\"", "[]", "[a]", "[1,[2]]", "{}", "{a:1}", "{a:{b:[c]}}", "a=b", "???", "${nothing}", "'${'", "${",
    "[", "}", "'", '"', "a,b", "1,2", "range(1,3)", "choice(a,b)", "int(x)", "str(1)", "\\", "\\,", "a b", "@", "é",
    "'a\nb'", "a\tb", "\x00", "\x1b", "\udcff", ":", "~", "*", "$",
)
NAMES = ("seeed", "gama", "", "a.b", "a b", "1", "é", LONG, "null", "trainer", "_target_", "search", "\n", "a=b", "\udcff")
# fmt: on


@dataclass
class Case:
    recipe: str
    overrides: list[str] = field(default_factory=list)
    changes: list[tuple[str, object]] = field(default_factory=list)
    """Set on the composed configuration: what a YAML file can hold and the command line cannot."""
    removed: list[str] = field(default_factory=list)

    def config(self) -> DictConfig:
        config = load_config(self.recipe, [*({"lab": []}.get(self.recipe, OWN)), *self.overrides])
        for key, value in self.changes:
            with suppress(ValueError):  # a name below a list
                OmegaConf.update(config, key, value, merge=False, force_add=True)
        OmegaConf.set_struct(config, False)
        for key in self.removed:
            parent, _, leaf = key.rpartition(".")
            node = OmegaConf.select(config, parent) if parent else config
            if isinstance(node, DictConfig):
                node.pop(leaf, None)
        return config

    def mutated(self) -> list[str]:
        written = [override.lstrip("+~").partition("=")[0] for override in self.overrides]
        return [*written, *(key for key, _ in self.changes), *self.removed]


NEUTRAL = "verl"  # refused until a launch gives its groups (tests/recipe/adopt)
RECIPES = [name for name in shipped_recipes() if name != NEUTRAL]
CUT = 20  # its cases have two recipes, because composing one takes as long as ten cases


@cache
def declared() -> list[str]:
    others = (
        *DATA,
        MODEL,
        *(f"{REWARD}.{name}" for name in ("path", "name", "reward_kwargs")),
        "credit_preset",
    )
    return [*others, *(key.name for section in (*OURS, *VERLS) for key in keys_of(section))]


@cache
def all_keys(recipe: str) -> list[str]:
    """Of values and of sections."""
    found: list[str] = []

    def walk(prefix: str, node: DictConfig) -> None:
        for name in node:
            found.append(f"{prefix}{name}")
            if isinstance(value := node._get_node(name), DictConfig) and not value._is_none():
                walk(f"{prefix}{name}.", value)

    walk("", load_config(recipe, {"lab": []}.get(recipe, OWN)))
    return found


def make(seed: int) -> Case:
    draw = random.Random(seed)
    case = Case(draw.choice(("lab", "search_cpu") if seed < CUT else RECIPES))
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        key = draw.choice(declared() if draw.random() < 0.6 else all_keys(case.recipe))
        if draw.random() < 0.2:  # one that is not there
            place = draw.choice((key, key.rpartition(".")[0]))
            key = draw.choice((f"{place}.{draw.choice(NAMES)}", draw.choice(NAMES), key[:-1], key.upper()))
        kind = draw.random()
        if kind < 0.5:
            sign = draw.choice(("", "", "", "", "+", "++", "~"))
            override = draw.choice((f"{sign}{key}={draw.choice(WRITTEN)}",) * 9 + (f"{sign}{key}",))
            case.overrides.append(override)
        elif kind < 0.95 and key.strip(".") == key and ".." not in key and key:
            case.changes.append((key, draw.choice(VALUES)))
        elif not key.startswith("."):
            case.removed.append(key)
    return case


def named(key: str, said: str) -> bool:
    """The key, the section above it that is unknown or is none, or a key that refers to it."""
    above = [key[:place] for place, sign in enumerate(key) if sign == "."]
    return (
        key in said
        or "has no value" in said
        or said.startswith(tuple(start for one in above for start in (f"unknown key {one}", f"{one}=")))
    )


def law(case: Case, explained: bool = True) -> str:
    try:
        config = case.config()
        validate(config)
    except ConfigError as error:
        said = str(error)
        lines = map(str, error.errors) if isinstance(error, ConfigErrors) else [said]
        assert all(line.isprintable() for line in lines), f"a refusal has more than one plain line: {said!r}"
        assert any(named(printable(key), said) for key in case.mutated()), (
            f"names none of {case.mutated()}: {said}"
        )
        return REFUSED
    Path(config.run_dir).expanduser().resolve()
    nothing_left(config)
    assert (missing_line(config) or "").isprintable()
    if explained:
        said = explanation(case.recipe, config, values=True)
        assert said.replace("\n", "").isprintable(), f"not printable: {said!r}"
    return ACCEPTED


@checker_of
def checker(folder: Path, seed: int) -> str:
    case = make(seed)
    with told(case):
        return law(case, explained=seed % 10 == 0)  # half of the time of a case


@cuts(CUT, failed=(2441, 6237, 8654, 8982))
def test_a_mutated_recipe_is_explained_or_refused_in_one_line(seeds, tmp_path):
    with checker(tmp_path) as check:
        try_all(check, seeds)
