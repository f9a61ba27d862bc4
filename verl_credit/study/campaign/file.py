"""A campaign's file: what is compared, how often, and by which number. Everything is declared before the first run."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from verl_credit.config.keys.section import Part, declared
from verl_credit.errors import ConfigError, did_you_mean
from verl_credit.recipe.recipe_files import read_tree, recipes_folder
from verl_credit.redact import redact_value

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.+-]{0,79}$")]
Number = Annotated[int, Field(ge=0, le=2**31 - 1)]
# Every run has its own value of these keys; the file gives them under another name.
OURS = {"seed": "seeds", "lab.world_seed": "worlds", "run_dir": "--dir"}
LEVEL = 0.05


class Metric(Part):
    name: str = Field(min_length=1)
    """a name in validation.jsonl (val-...: held out), or in metrics.jsonl (measured in training)"""
    window: list[Number] = Field(min_length=2, max_length=2)
    """[FIRST, LAST] step of the area under the curve"""
    higher_is_better: bool = True
    """true or false"""

    @property
    def held_out(self) -> bool:
        return self.name.startswith("val-")


class Budget(Part):
    runs: Annotated[int, Field(ge=1)] | None = None
    """runs at most, a whole number of at least 1, or null"""
    hours: Annotated[float, Field(gt=0)] | None = None
    """no run starts after the runs together took so many hours; a number above 0, or null"""


class Stop(Part):
    max_failures: Annotated[int, Field(ge=1)] | None = None
    """no run starts after so many failed since `campaign run`; a whole number of at least 1, or null"""


class Campaign(Part):
    name: Name
    """a name of letters, digits and ._+-"""
    hypothesis: str = Field(min_length=1)
    """what is expected and why, in prose, written before the first run"""
    expected_delta: str | None = None
    """the difference that is expected, in words (in quotes), or null"""
    engine: Literal["train", "twin"] = "train"
    """train (verl's trainer), or twin (the lab in one process, without Ray)"""
    recipe: str = Field(min_length=1)
    """a shipped recipe, or one in config_dir"""
    config_dir: str | None = None
    """a folder with your own recipes, from this file on, or null"""
    overrides: list[str] = []
    """a list of Hydra overrides that all runs share"""
    conditions: dict[Name, list[str]] = Field(min_length=2)
    """at least two names (letters, digits, ._+-), each with its list of Hydra overrides"""
    baseline: str
    """the name of a condition"""
    seeds: list[Number] = Field(min_length=1)
    """a list of whole numbers"""
    worlds: list[Number] | None = None
    """a list of the lab's world seeds; null for recipes without the lab"""
    budget: Budget = Budget()
    """a mapping with runs and hours"""
    stop: Stop = Stop()
    """a mapping with max_failures"""
    metric: Metric
    """a mapping with name and window"""
    comparisons: Literal["baseline", "all"] | list[list[str]] = "baseline"
    """baseline (each condition against it), all (every pair), or a list of pairs [A, B]"""
    factors: dict[Name, dict[Name, list[str]]] | None = None
    """FACTOR: {LEVEL: [CONDITION, ...]}, or null"""

    def pairs(self) -> list[tuple[str, str]]:
        """The declared comparisons: the family over which Holm corrects."""
        if self.comparisons == "all":
            return [(b, a) for a, b in itertools.combinations(self.conditions, 2)]
        if self.comparisons == "baseline":
            return [(name, self.baseline) for name in self.conditions if name != self.baseline]
        return [(a, b) for a, b in self.comparisons]

    def levels(self) -> dict[str, dict[str, str]]:
        """Factor to condition to level."""
        return {
            factor: {name: level for level, names in of.items() for name in names}
            for factor, of in (self.factors or {}).items()
        }

    def blocks(self) -> list[tuple[int, int | None]]:
        """(seed, world): what runs are paired by. All seeds of a world before the next world."""
        return [(seed, world) for world in self.worlds or [None] for seed in self.seeds]

    def cannot_resolve(self) -> str:
        """A sentence where the declared pairs cannot resolve any comparison; else empty."""
        pairs, family = len(self.blocks()), len(self.pairs())
        least = fewest_pairs(family)
        if pairs >= least:
            return ""
        few, many = (f"{n} {what}{'s' * (n != 1)}" for n, what in ((pairs, "pair"), (family, "comparison")))
        return f"{few} (seed, world) cannot resolve {many} at {100 * LEVEL:g} %: at least {least} are needed"


def fewest_pairs(family: int) -> int:
    """The smallest n with family 2 / 2^n <= LEVEL: after Holm, fewer pairs cannot reach the level.

    The sign-flip test of n pairs has 2^n equally likely outcomes; its two most extreme give p = 2 / 2^n.
    """
    return math.ceil(math.log2(2 * family / LEVEL))


def read_campaign(name: str) -> tuple[Campaign, Path]:
    """A file, or a shipped campaign by name, and where it stands. Raises ConfigError, which names file, key and value."""
    shipped = {file.stem: file for file in sorted((recipes_folder() / "campaigns").glob("*.yaml"))}
    path = Path(name) if Path(name).is_file() else shipped.get(name)
    if path is None:
        near = did_you_mean(Path(name).stem, shipped)
        raise ConfigError(f"{name} is no file and no shipped campaign{near}: {', '.join(shipped)}")
    campaign = parse(read_tree(path), str(path))
    if campaign.config_dir is not None:
        own = str((path.parent / campaign.config_dir).resolve())
        campaign = campaign.model_copy(update={"config_dir": own})
    return campaign, path


def parse(tree: Any, source: str) -> Campaign:
    """``source``: what messages call the file. Raises ConfigError for the first key that does not fit the others."""
    campaign = declared(Campaign, tree, source)

    def refuse(key: str, value: object, right: str) -> None:
        raise ConfigError(f"{source}: {key}={value}: {right}", key=key, value=value, accepted=right)

    names = list(campaign.conditions)

    def known(key: str, name: str) -> None:
        if name not in names:
            refuse(key, name, f"expected a condition{did_you_mean(name, names)}: {', '.join(names)}")

    known("baseline", campaign.baseline)
    for key, values in (("seeds", campaign.seeds), ("worlds", campaign.worlds or [])):
        if twice := sorted({v for v in values if values.count(v) > 1}):
            refuse(key, twice[0], "it stands there twice; a second run would be the same run")
    if campaign.worlds == []:
        refuse("worlds", [], "expected at least one, or null")
    first, last = campaign.metric.window
    least = 0 if campaign.metric.held_out else 1
    if not least <= first < last:
        refuse("metric.window", [first, last], f"expected a first step of at least {least}, below the last")
    conditions = [(f"conditions.{name}", overrides) for name, overrides in campaign.conditions.items()]
    for where, overrides in (("overrides", campaign.overrides), *conditions):
        for text in overrides:
            if (key := text.partition("=")[0].lstrip("+~")) in OURS:
                refuse(where, redact_value(key, text), f"every run has its own {key}; give {OURS[key]}")
    if isinstance(campaign.comparisons, list):
        _comparisons(campaign.comparisons, known, refuse)
    if campaign.factors is not None:
        _factors(campaign, known, refuse)
    return campaign


def _comparisons(pairs: list[list[str]], known, refuse) -> None:
    seen: list[set[str]] = []
    if not pairs:
        refuse("comparisons", [], "expected at least one pair, baseline or all")
    for pair in pairs:
        if len(pair) != 2 or pair[0] == pair[1]:
            refuse("comparisons", pair, "expected two different conditions [A, B]")
        for name in pair:
            known("comparisons", name)
        if set(pair) in seen:
            refuse("comparisons", pair, "this pair is declared twice")
        seen.append(set(pair))


def _factors(campaign: Campaign, known, refuse) -> None:
    """Every factor gives every condition one level, and no two conditions have the same levels."""
    if len(campaign.factors) < 2:
        refuse("factors", list(campaign.factors), "a factorial has at least two factors")
    for factor, of in campaign.factors.items():
        given = [name for names in of.values() for name in names]
        for name in given:
            known(f"factors.{factor}", name)
        if len(of) < 2 or sorted(given) != sorted(campaign.conditions):
            use = "expected two levels or more, and every condition in exactly one of them"
            refuse(f"factors.{factor}", dict(of), use)
    taken: dict[tuple, str] = {}
    levels = campaign.levels()
    for name in campaign.conditions:
        cell = tuple(of[name] for of in levels.values())
        if cell in taken:
            refuse("factors", name, f"it has the same levels as {taken[cell]}: {', '.join(cell)}")
        taken[cell] = name
