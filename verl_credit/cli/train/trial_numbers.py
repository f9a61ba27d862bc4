"""Reads a trial's numbers from its run's files: the metric that decides, and means over its steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from verl_credit.records.report.run_data import Run, Series, read_run, series
from verl_credit.records.report.text import interval


class Metric(NamedTuple):
    """The held-out metric after the last evaluated step. ``interval`` is the 95 % interval, where the number of questions is
    known; ``why`` is the reason for a missing value."""

    name: str = ""
    value: float | None = None
    step: int | None = None
    n: int | None = None
    interval: tuple[float, float] | None = None
    domain: str = ""
    why: str = ""


def held_out_metric(config: DictConfig, run: Run | None) -> Metric:
    """Returns ``lineage.metric``, or exact match: greedy where it is evaluated, Σ right / Σ questions over all sources.

    An evaluation before the first step does not measure the trial. There is no metric where data.val_files holds a file of
    data.train_files, because its questions are not held out.
    """
    if shared := sorted(_files(config.data.train_files) & _files(config.data.val_files)):
        return Metric(why=f"no held-out metric: {shared[0]} is in data.val_files and in data.train_files")
    if run is None:
        return Metric(why="no held-out metric: no step was made")
    if name := config.lineage.metric:
        measured = _trained(series(run.validation, name))
        if not measured:
            return Metric(
                name, why=f"no held-out metric: validation.jsonl has no {name} after a training step"
            )
        return Metric(name, measured.values[-1], measured.steps[-1])
    return _exact_match(run)


def _files(value: object) -> set[str]:
    names = list(value) if OmegaConf.is_list(value) else [] if value is None else [value]
    return {str(Path(str(name)).expanduser().resolve()) for name in names}


def _trained(found: Series) -> Series:
    pairs = [pair for pair in zip(found.steps, found.values, strict=True) if pair[0] > 0]
    return Series(tuple(step for step, _ in pairs), tuple(value for _, value in pairs))


def _exact_match(run: Run) -> Metric:
    entries = [(one, _trained(one.em)) for one in run.held_out()]
    entries = [(one, em) for one, em in entries if em]
    if not entries:
        return Metric(
            why="no held-out metric: no exact match was evaluated after a training step; lineage.metric names another"
        )
    mode = min(one.mode for one, _ in entries)  # greedy sorts before sampled
    entries = [(one, em) for one, em in entries if one.mode == mode]
    step = max(em.steps[-1] for _, em in entries)
    entries = [(one, em) for one, em in entries if em.steps[-1] == step]
    questions = [one.questions for one, _ in entries]
    counts = [dict(zip(one.steps, one.values, strict=True))[step] for one in questions]
    domain = ", ".join(one.source for one, _ in entries)
    name = f"exact match, {mode}"
    n = int(sum(counts))
    share = sum(em.values[-1] * count for (_, em), count in zip(entries, counts, strict=True)) / n
    return Metric(name, share, step, n, interval(share, n) if 0 <= share <= 1 else None, domain)


def read_steps(run_dir: Path) -> Run | None:
    """Returns None for a run without a step."""
    try:
        return read_run(run_dir)
    except (FileNotFoundError, ValueError):
        return None


def of_steps(run: Run | None, after: int) -> dict[str, Any]:
    """Returns means over the steps after ``after``; a metric that metrics.jsonl lacks is None and named in ``absent``."""
    rows = [row for row in run.metrics if row["step"] > after] if run else []
    names = run.names(rf"{run.reward_metric}/turn_(\d+)") if run else []
    turns = {int(name.rpartition("_")[2]): name for name in names}
    facts: dict[str, Any] = {
        "steps": len(rows),
        "clip_scale_mean": _mean(rows, "credit/clip_scale/mean"),
        "clip_scale_std": _mean(rows, "credit/clip_scale/std"),
        "gain_by_turn": {turn: _mean(rows, name) for turn, name in turns.items()} or None,
        "token_entropy": _mean(rows, "actor/entropy"),
        "train_s": sum(series(rows, "timing_s/step").values) if rows else None,
    }
    return facts | {"absent": [name for name, value in facts.items() if value is None]}


def _mean(rows: list[dict], name: str) -> float | None:
    values = series(rows, name).values
    return sum(values) / len(values) if values else None
