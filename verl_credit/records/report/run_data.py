"""A run as its files record it: series over steps, held-out series by source and mode, sample trajectories."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

from verl_credit.records.run.files import EVENTS, METRICS, VALIDATION, read_json_lines
from verl_credit.records.run.rollouts import read_samples
from verl_credit.records.run.validation import EM, REWARD, held_out_names
from verl_credit.records.run.versions import VERSIONS, read_versions

# The settings that the report shows first.
SHOWN = (
    "seed", "actor_rollout_ref.model.path", "algorithm.adv_estimator", "algorithm.info_gain_norm_mode",
    "algorithm.turn_signal", "algorithm.turn_signals", "algorithm.info_gain_type", "algorithm.info_gain_first_turn",
    "algorithm.info_gain_context", "algorithm.gamma", "algorithm.adv_rescale_alpha",
    "actor_rollout_ref.actor.policy_loss.loss_mode", "actor_rollout_ref.actor.policy_loss.ratio_level",
    "actor_rollout_ref.actor.policy_loss.dynamic_clip", "actor_rollout_ref.actor.policy_loss.clip_beta",
    "actor_rollout_ref.actor.optim.lr", "actor_rollout_ref.actor.ppo_mini_batch_size", "actor_rollout_ref.rollout.n",
    "data.train_batch_size", "reward.custom_reward_function.path",
)  # fmt: skip


@dataclass(frozen=True)
class Series:
    """Values at the steps that have one, in step order."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.steps)

    def over(self, divisor: Series) -> Series:
        """Quotient at the steps that both have; steps where the divisor is 0 are left out."""
        by, own = (dict(zip(one.steps, one.values, strict=True)) for one in (divisor, self))
        found = {step: value / by[step] for step, value in own.items() if by.get(step)}
        return Series(tuple(found), tuple(found.values()))


@dataclass(frozen=True)
class HeldOut:
    """Held-out score of one data source in one sampling mode: exact match, or the reward where there is none."""

    source: str
    mode: str
    measure: str
    score: Series
    em_well_formatted: Series
    questions: Series
    """How many there were."""


@dataclass(frozen=True)
class Run:
    folder: Path
    metrics: list[dict]
    validation: list[dict]
    trajectories: list[dict]
    trajectory_problems: list[str]
    events: list[dict]
    settings: dict[str, str]
    config_problem: str
    versions: dict[str, str]
    versions_problem: str

    @property
    def other_signal(self) -> bool:
        """The turn rewards have another source than information gain."""
        return any("credit/turn_reward/mean" in row for row in self.metrics)

    @property
    def reward_metric(self) -> str:
        return "credit/turn_reward" if self.other_signal else "credit/gain"

    @property
    def reward_title(self) -> str:
        return "Turn reward" if self.other_signal else "Information gain"

    def series(self, name: str) -> Series:
        return series(self.metrics, name)

    def names(self, pattern: str) -> list[str]:
        """Metric names that match the whole pattern, ordered by the number in its first group."""
        seen = {name for row in self.metrics for name in row}
        matches = [match for name in seen if (match := re.fullmatch(pattern, name))]
        return [match[0] for match in sorted(matches, key=lambda match: int(match[1]))]

    def held_out(self) -> list[HeldOut]:
        """Returns an entry for each data source and mode, greedy before sampled."""
        entries = []
        for (source, mode), names in held_out_names(
            {name for row in self.validation for name in row}
        ).items():
            measure = EM if EM in names else REWARD
            score, ok = (series(self.validation, names.get(name, "")) for name in (measure, "format_ok"))
            if score:
                formatted = score.over(ok) if measure == EM else Series()
                questions = series(self.validation, f"val-aux/{source}-{mode}/questions")
                entries.append(HeldOut(source, mode, measure, score, formatted, questions))
        return entries

    @property
    def own_reward(self) -> bool:
        """The reward function gives no exact match."""
        measures = {one.measure for one in self.held_out()}
        seen = REWARD in measures or bool(self.series("critic/score/mean"))
        return seen and EM not in measures and not self.series("credit/outcome/em")

    @property
    def in_environment(self) -> bool:
        """The exact match is the success that an environment says."""
        return bool(self.series("credit/env/success"))

    def event(self, kind: str) -> list[str]:
        return [str(row.get("text", "")) for row in self.events if row.get("kind") == kind]


def read_run(folder: Path) -> Run:
    """Read every file of the run; of a step that was written twice the last line is used."""
    path = folder / METRICS
    if not path.exists():
        below = [
            str(file.parent) for level in ("*", "*/*") for file in sorted(folder.glob(f"{level}/{METRICS}"))
        ]
        runs = f"; below it are {', '.join(below[:5])}" if below else ""
        raise FileNotFoundError(
            f"{path} does not exist: a report needs the folder of a run (its run_dir){runs}"
        )
    metrics = _by_step(path)
    if not metrics:
        raise ValueError(f"{path} holds no complete line: the run has not finished its first step")
    samples, problems = read_samples(folder, metrics[-1]["step"])
    validation, events = _by_step(folder / VALIDATION), read_json_lines(folder / EVENTS)
    settings = read_settings(folder / "config.yaml")
    return Run(folder, metrics, validation, samples, problems, events, *settings, *_versions(folder))


def _versions(folder: Path) -> tuple[dict[str, str], str]:
    try:
        saved = read_versions(folder)
    except (OSError, ValueError, RecursionError) as error:
        return {}, f"{VERSIONS} is damaged ({' '.join(str(error).split())})"
    return saved or {}, "" if saved else f"{VERSIONS} is {'missing' if saved is None else 'empty'}"


def read_settings(path: Path) -> tuple[dict[str, str], str]:
    """The keys of ``SHOWN`` that the resolved configuration has, as written there, and what is wrong with the file."""
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader)  # every value stays text
    except FileNotFoundError:
        return {}, f"{path.name} is missing"
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        return {}, f"{path.name} is damaged ({' '.join(str(error).split())})"
    settings = {}
    for name in SHOWN:
        node = tree
        for part in name.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        if node and isinstance(node, str):
            settings[name] = node
    return settings, ""


def series(rows: list[dict], name: str) -> Series:
    """The finite numbers under ``name``; null and missing values are left out."""
    pairs = [(row["step"], value) for row in rows if (value := number(row.get(name))) is not None]
    return Series(tuple(step for step, _ in pairs), tuple(value for _, value in pairs))


def number(value: object) -> float | None:
    """A finite number; None for everything else, text and an integer of more than 308 digits included."""
    with suppress(OverflowError):
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    return None


def _by_step(path: Path) -> list[dict]:
    rows: dict[int, dict] = {}
    for row in read_json_lines(path):
        step = row.get("step")
        if type(step) is not int or not 0 <= step < 2**53:
            raise ValueError(f"{path}: a line has step={step!r}, expected a step's number: {str(row)[:120]}")
        rows[step] = row
    return [rows[step] for step in sorted(rows)]
