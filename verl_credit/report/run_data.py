"""A run as its files tell it: series over steps, held-out series by source and mode, sample trajectories."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

from verl_credit.run.files import EVENTS, METRICS, TRAJECTORIES, VALIDATION, read_json_lines

# The settings that a reader of the report asks for first.
SHOWN = (
    "seed",
    "actor_rollout_ref.model.path",
    "algorithm.adv_estimator",
    "algorithm.info_gain_norm_mode",
    "algorithm.info_gain_type",
    "algorithm.info_gain_first_turn",
    "algorithm.info_gain_context",
    "algorithm.gamma",
    "algorithm.adv_rescale_alpha",
    "actor_rollout_ref.actor.policy_loss.loss_mode",
    "actor_rollout_ref.actor.policy_loss.ratio_level",
    "actor_rollout_ref.actor.policy_loss.dynamic_clip",
    "actor_rollout_ref.actor.policy_loss.clip_beta",
    "actor_rollout_ref.actor.optim.lr",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.rollout.n",
    "data.train_batch_size",
)
_HELD_OUT = re.compile(
    r"val-(?:core|aux)/(?P<source>.+)-(?P<mode>greedy|sampled)/(?P<score>em|format_ok)/mean@(?P<n>\d+)"
)


@dataclass(frozen=True)
class Series:
    """Values at the steps that have one, in step order."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.steps)

    def over(self, divisor: Series) -> Series:
        """Quotient at the steps that both have; steps where the divisor is 0 are left out."""
        by_step = dict(zip(divisor.steps, divisor.values, strict=True))
        pairs = [
            (step, value / by_step[step])
            for step, value in zip(self.steps, self.values, strict=True)
            if by_step.get(step)
        ]
        return Series(tuple(step for step, _ in pairs), tuple(value for _, value in pairs))


@dataclass(frozen=True)
class HeldOut:
    """Held-out exact match of one data source in one sampling mode."""

    source: str
    mode: str
    em: Series
    em_well_formatted: Series


@dataclass(frozen=True)
class Run:
    folder: Path
    metrics: list[dict]
    validation: list[dict]
    trajectories: list[dict]
    events: list[dict]
    settings: dict[str, str]

    def series(self, name: str) -> Series:
        return series(self.metrics, name)

    def names(self, pattern: str) -> list[str]:
        """Metric names that match the whole pattern, ordered by the number in its first group."""
        seen = {name for row in self.metrics for name in row}
        found = [match for name in seen if (match := re.fullmatch(pattern, name))]
        return [match[0] for match in sorted(found, key=lambda match: int(match[1]))]

    def held_out(self) -> list[HeldOut]:
        """One entry per data source and mode, greedy before sampled; of several ``mean@n`` the largest n."""
        names: dict[tuple, dict[str, tuple[int, str]]] = {}
        for name in {name for row in self.validation for name in row}:
            if match := _HELD_OUT.fullmatch(name):
                scores = names.setdefault((match["source"], match["mode"]), {})
                scores[match["score"]] = max(scores.get(match["score"], (0, "")), (int(match["n"]), name))
        found = []
        for (source, mode), scores in sorted(names.items()):
            em, ok = (
                series(self.validation, scores[s][1]) if s in scores else Series()
                for s in ("em", "format_ok")
            )
            if em:
                found.append(HeldOut(source, mode, em, em.over(ok)))
        return found

    def event(self, kind: str) -> list[str]:
        return [str(row.get("text", "")) for row in self.events if row.get("kind") == kind]


def read_run(folder: Path) -> Run:
    """Read every file of the run; a step written twice counts once, as last written."""
    path = folder / METRICS
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: a report needs the folder of a run (its run_dir)")
    metrics = _by_step(path)
    if not metrics:
        raise ValueError(f"{path} holds no complete line: the run has not finished its first step")
    return Run(
        folder=folder,
        metrics=metrics,
        validation=_by_step(folder / VALIDATION),
        trajectories=read_json_lines(folder / TRAJECTORIES),
        events=read_json_lines(folder / EVENTS),
        settings=read_settings(folder / "config.yaml"),
    )


def read_settings(path: Path) -> dict[str, str]:
    """The keys of ``SHOWN`` that the resolved configuration has, as written there; of a missing or damaged file none."""
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader)  # every value stays text
    except (FileNotFoundError, yaml.YAMLError):
        return {}
    found = {}
    for name in SHOWN:
        node = tree
        for part in name.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        if node and isinstance(node, str):
            found[name] = node
    return found


def series(rows: list[dict], name: str) -> Series:
    """The finite numbers under ``name``; null and missing are left out."""
    pairs = [(row["step"], float(row[name])) for row in rows if _is_number(row.get(name))]
    return Series(tuple(step for step, _ in pairs), tuple(value for _, value in pairs))


def _by_step(path: Path) -> list[dict]:
    rows: dict[int, dict] = {}
    for row in read_json_lines(path):
        step = row.get("step")
        if type(step) is not int:
            raise ValueError(f"{path}: a line has step={step!r}, expected an integer: {str(row)[:120]}")
        rows[step] = row
    return [rows[step] for step in sorted(rows)]


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
