"""Compares two runs or recipes key by key."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from verl_credit.cli.saved_run import CONFIG, run_config
from verl_credit.config.resolved import flat_values
from verl_credit.errors import ConfigError, show_value
from verl_credit.recipe.compose import ABSENT, Default, defaults, load_config
from verl_credit.records.run.files import METRICS, VALIDATION, read_json_lines
from verl_credit.records.run.validation import EM, REWARD, held_out_names
from verl_credit.records.run.versions import installed_versions, read_versions

ACTOR = "actor_rollout_ref.actor."
LAST = "paths and logging"
# A key belongs to the first group that matches.
GROUPS = {
    LAST: (
        "run_dir", "lab.dir", "lab.index", "real.dir", "doorkey.dir", "search.url", "keep_rollouts.*", "credit_preset",
        "credit_overrides", "credit_reason",
        "lineage.*", "trainer.logger", "trainer.default_local_dir", "trainer.log_val_generations",
        "trainer.rollout_data_dir", "trainer.validation_data_dir", "trainer.default_hdfs_dir", "global_profiler.*",
        "*.save_path", "*.served_model_name", "*.project_name", "*.experiment_name",
    ),
    "seeds": ("seed", "lab.world_seed", "doorkey.world_seed", "*.seed", "*.data_loader_seed"),
    "credit": ("algorithm.*", f"{ACTOR}policy_loss.*", f"{ACTOR}clip_ratio*", "evaluation.*", "faults.*"),
    "model": ("actor_rollout_ref.model.*",),
    "data": ("data.*", "lab.*", "search.*", "reward.*"),
    "optimiser": (f"{ACTOR}*", "actor_rollout_ref.ref.*", "critic.*", "trainer.total_*", "trainer.critic_*"),
    "rollout": ("actor_rollout_ref.rollout.*", "max_hours"),
    "machine": ("trainer.device", "trainer.nnodes", "trainer.n_gpus_per_node", "ray_kwargs.*", "transfer_queue.*"),
    "other": ("*",),
}  # fmt: skip
ORDER = (*list(GROUPS)[2:], "seeds", "versions", LAST)
SCORES = (
    "credit/outcome/em",
    "credit/outcome/f1",
    "critic/score/mean",
    "credit/turns_per_row",
    "timing_s/step",
)


@dataclass(frozen=True)
class Side:
    """A run or a recipe. ``scores``: the last metrics by name, None for a recipe."""

    label: str
    values: dict[str, object]
    versions: dict[str, str]
    scores: dict[str, float] | None = None


class Row(NamedTuple):
    """``default``: the key's; ABSENT for a key without a default, and for versions."""

    key: str
    a: object
    b: object
    default: object = ABSENT


Groups = dict[str, list[Row]]


def read_side(text: str, config_dir: str | None = None) -> Side:
    """Reads a folder as a run, any other text as a recipe's name with overrides. A bare name is read as a folder only when
    it holds a run, so that a folder called "lab" does not hide the recipe. Raises ConfigError, ValueError."""
    folder = Path(text).expanduser()
    if text and folder.is_dir() and ("/" in text or (folder / CONFIG).is_file()):
        return read_run_side(folder)
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{text!r}: {error}") from error
    if not words or "/" in words[0]:
        raise ConfigError(f"{text!r}: no such folder; expected a run's, or a recipe: 'lab credit=grpo'")
    try:
        config = load_config(words[0], words[1:], config_dir)
    except ConfigError as error:
        raise ConfigError(f"{text} would be refused: {error}", key=error.key, value=error.value) from error
    return Side(text, flat_values(config), installed_versions())


def read_run_side(folder: Path) -> Side:
    values, versions = flat_values(run_config(folder)), read_versions(folder)
    return Side(str(folder), values, versions or {}, last_scores(folder))


def last_scores(folder: Path) -> dict[str, float]:
    """Returns the scores of the last step and of the last held-out evaluation; "steps" is the number of the last step."""
    step, held_out = ((read_json_lines(folder / name) or [{}])[-1] for name in (METRICS, VALIDATION))
    found = {"steps": step.get("step"), **{name: step.get(name) for name in SCORES}}
    found |= {"held-out step": held_out.get("step")}
    names = [of.get(EM) or of.get(REWARD) for of in held_out_names(held_out).values()]
    found |= {name: held_out[name] for name in sorted(filter(None, names))}
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


def compare(a: Side, b: Side, base: Callable[[], dict[str, Default]] = defaults) -> Groups:
    """Groups the keys and versions whose values differ; keys in A's order, then the keys that only B has."""
    groups: Groups = {name: [] for name in ORDER}
    known = None
    for key in dict.fromkeys([*a.values, *b.values]):
        left, right = a.values.get(key, ABSENT), b.values.get(key, ABSENT)
        if left != right:
            known = base() if known is None else known
            default = known[key].value if key in known else ABSENT
            groups[group_of(key)].append(Row(key, left, right, default))
    if a.versions and b.versions:  # a run of an earlier version wrote none
        for name in dict.fromkeys([*a.versions, *b.versions]):
            left, right = a.versions.get(name, ABSENT), b.versions.get(name, ABSENT)
            groups["versions"] += [Row(name, left, right)] if left != right else []
    return {name: rows for name, rows in groups.items() if rows}


def group_of(key: str) -> str:
    return next(name for name in GROUPS if any(fnmatchcase(key, pattern) for pattern in GROUPS[name]))


def count(groups: Groups) -> int:
    """The number of values that differ. Paths and logging, which differ between any two runs, do not count."""
    return sum(len(rows) for name, rows in groups.items() if name != LAST)


def page(a: Side, b: Side, groups: Groups) -> list[str]:
    lines = [f"A: {a.label}", f"B: {b.label}"]
    for name, rows in groups.items():
        width = max(len(row.key) for row in rows)
        lines += ["", name]
        for row in rows:
            default = f"   (default {show_value(row.default)})" if row.default != ABSENT else ""
            lines.append(f"  {row.key:<{width}}  {show_value(row.a)}  ->  {show_value(row.b)}{default}")
    if unknown := [side.label for side in (a, b) if not side.versions]:
        lines += ["", f"versions were not recorded by {' and '.join(unknown)}"]
    if a.scores is not None and b.scores is not None:
        names = list(dict.fromkeys([*a.scores, *b.scores]))
        width = max(map(len, names), default=0)
        lines += ["", "last metrics" if names else "last metrics: neither has made a step"]
        lines += [f"  {n:<{width}}  {number(a.scores.get(n))}  ->  {number(b.scores.get(n))}" for n in names]
    equal = "equal but for paths and logging" if groups else "equal"
    return [*lines, "", f"{count(groups)} values differ" if count(groups) else equal]


def number(value: float | None) -> str:
    return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.4g}"


def as_data(a: Side, b: Side, groups: Groups) -> dict:
    def entry(row: Row) -> dict:
        return row._asdict() | ({"default": None} if row.default == ABSENT else {})

    rows, scores = {name: list(map(entry, groups[name])) for name in groups}, {"a": a.scores, "b": b.scores}
    return {"a": a.label, "b": b.label, "equal": not count(groups), "groups": rows, "scores": scores}
