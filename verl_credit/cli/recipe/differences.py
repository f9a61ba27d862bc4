"""Compares two runs or recipes key by key."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from verl_credit.cli.saved_run import CONFIG, run_config
from verl_credit.config.resolved import flat_values
from verl_credit.errors import ConfigError, show_value
from verl_credit.recipe.compose import ABSENT, Default, defaults, load_config
from verl_credit.records.run.files import METRICS, VALIDATION, read_json_lines
from verl_credit.records.run.versions import installed_versions, read_versions

ACTOR = "actor_rollout_ref.actor."

# A key belongs to the first group that matches.
GROUPS = (
    ("paths and logging", (
        "run_dir", "lab.dir", "lab.index", "real.dir", "search.url", "keep_rollouts.", "credit_preset", "credit_overrides",
        "lineage.", "trainer.logger", "trainer.default_local_dir",
        "trainer.log_val_generations", "trainer.rollout_data_dir", "trainer.validation_data_dir",
        "trainer.default_hdfs_dir", "global_profiler.", "*.save_path", "*.served_model_name",
        "*.project_name", "*.experiment_name",
    )),
    ("seeds", ("seed", "lab.world_seed", "*.seed", "*.data_loader_seed")),
    ("credit", ("algorithm.", f"{ACTOR}policy_loss.", f"{ACTOR}clip_ratio*", "evaluation.", "faults.")),
    ("model", ("actor_rollout_ref.model.",)),
    ("data", ("data.", "lab.", "search.", "reward.")),
    ("optimiser", (ACTOR, "actor_rollout_ref.ref.", "critic.", "trainer.total_", "trainer.critic_")),
    ("rollout", ("actor_rollout_ref.rollout.", "max_hours")),
    ("machine", ("trainer.device", "trainer.nnodes", "trainer.n_gpus_per_node", "ray_kwargs.", "transfer_queue.")),
    ("other", ("*",)),
)  # fmt: skip
LAST = "paths and logging"
ORDER = ("credit", "model", "data", "optimiser", "rollout", "machine", "other", "seeds", "versions", LAST)
SCORES = (
    "credit/outcome/em",
    "credit/outcome/f1",
    "critic/score/mean",
    "credit/turns_per_row",
    "timing_s/step",
)
NUMBER = int | float  # a damaged file may have another value


@dataclass(frozen=True)
class Side:
    """A run or a recipe. ``scores``: the last metrics by name, None for a recipe."""

    label: str
    values: dict[str, object]
    versions: dict[str, str]
    scores: dict[str, float] | None = None


class Row(NamedTuple):
    key: str
    a: object
    b: object
    default: object = ABSENT
    """The key's default; ABSENT for a key without a default, and for versions."""


@dataclass(frozen=True)
class Difference:
    a: Side
    b: Side
    groups: dict[str, list[Row]] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Are all numbers equal? Paths and logging, which differ between any two runs, are printed and do not decide."""
        return not any(rows for name, rows in self.groups.items() if name != LAST)


def read_side(text: str, config_dir: str | None = None) -> Side:
    """Reads a folder as a run, any other text as a recipe's name with overrides. Raises ConfigError, ValueError.

    A bare name is read as a folder only when it holds a run, so that a folder called "lab" does not hide the recipe.
    """
    folder = Path(text).expanduser()
    if text and folder.is_dir() and ("/" in text or (folder / CONFIG).is_file()):
        return read_run_side(folder)
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{text!r}: {error}") from error
    if not words:
        raise ConfigError("'': give the folder of a run, or a recipe in quotes: 'lab credit=grpo'")
    if "/" in words[0]:
        raise ConfigError(f"{text}: no such folder; give the folder of a run, or a recipe's name")
    try:
        config = load_config(words[0], words[1:], config_dir)
    except ConfigError as error:
        message = f"{text} would be refused: {error}"
        raise ConfigError(message, key=error.key, value=error.value, accepted=error.accepted) from error
    return Side(text, flat_values(config), installed_versions())


def read_run_side(folder: Path) -> Side:
    values, versions = flat_values(run_config(folder)), read_versions(folder)
    return Side(str(folder), values, versions or {}, last_scores(folder))


def last_scores(folder: Path) -> dict[str, float]:
    """Returns the scores of the last step and of the last held-out evaluation; "steps" is the number of the last step."""
    by_name: dict[str, float] = {}
    rows = read_json_lines(folder / METRICS)
    if rows:
        steps = [row["step"] for row in rows if isinstance(row.get("step"), NUMBER)]
        by_name["steps"] = max(steps, default=0)
        by_name |= {name: value for name in SCORES if isinstance(value := rows[-1].get(name), NUMBER)}
    for row in read_json_lines(folder / VALIDATION)[-1:]:
        by_name |= {"held-out step": row["step"]} if isinstance(row.get("step"), NUMBER) else {}
        by_name |= {k: v for k, v in sorted(row.items()) if "/em/mean@" in k and isinstance(v, NUMBER)}
    return by_name


def compare(a: Side, b: Side, base: Callable[[], dict[str, Default]] = defaults) -> Difference:
    """Groups the keys and versions whose values differ; keys in A's order, then the keys that only B has."""
    groups: dict[str, list[Row]] = {name: [] for name in ORDER}
    known = None
    for key in dict.fromkeys([*a.values, *b.values]):
        left, right = a.values.get(key, ABSENT), b.values.get(key, ABSENT)
        if left != right:
            known = base() if known is None else known
            default = known[key].value if key in known else ABSENT
            groups[group_of(key)].append(Row(key, left, right, default))
    for name in dict.fromkeys([*a.versions, *b.versions]):
        # The versions of a run that wrote none cannot be compared.
        left, right = a.versions.get(name, ABSENT), b.versions.get(name, ABSENT)
        if left != right and a.versions and b.versions:
            groups["versions"].append(Row(name, left, right))
    return Difference(a, b, {name: rows for name, rows in groups.items() if rows})


def group_of(key: str) -> str:
    """``*.seed`` matches the last part; ``data.``, ``trainer.total_`` and ``clip_ratio*`` the start; else the whole key."""

    def matches(pattern: str) -> bool:
        if pattern.startswith("*."):
            return key.endswith(pattern[1:])
        if pattern.endswith((".", "_", "*")):
            return key.startswith(pattern.rstrip("*"))
        return key == pattern

    return next(name for name, patterns in GROUPS if any(map(matches, patterns)))


def page(found: Difference) -> list[str]:
    a, b = found.a, found.b
    lines = [f"A: {a.label}", f"B: {b.label}"]
    for name, rows in found.groups.items():
        lines += ["", name]
        width = max(len(row.key) for row in rows)
        for row in rows:
            default = f"   (default {show_value(row.default)})" if row.default != ABSENT else ""
            lines.append(f"  {row.key:<{width}}  {show_value(row.a)}  ->  {show_value(row.b)}{default}")
    unknown = [side.label for side in (a, b) if not side.versions]
    if unknown:
        lines += ["", f"versions were not recorded by {' and '.join(unknown)}"]
    if a.scores is not None and b.scores is not None:
        names = list(dict.fromkeys([*a.scores, *b.scores]))
        width = max(map(len, names), default=0)
        lines += ["", "last metrics" if names else "last metrics: neither has made a step"]
        lines += [f"  {n:<{width}}  {number(a.scores.get(n))}  ->  {number(b.scores.get(n))}" for n in names]
    count = sum(len(rows) for name, rows in found.groups.items() if name != LAST)
    verdict = "equal" if found.equal else f"{count} values differ"
    if found.equal and found.groups:
        verdict = "equal but for paths and logging"
    return [*lines, "", verdict]


def number(value: float | None) -> str:
    return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.4g}"


def as_data(found: Difference) -> dict:
    return {
        "a": found.a.label,
        "b": found.b.label,
        "equal": found.equal,
        "groups": {
            name: [
                row._asdict() | {"default": None if row.default == ABSENT else row.default} for row in rows
            ]
            for name, rows in found.groups.items()
        },
        "scores": {"a": found.a.scores, "b": found.b.scores},
    }
