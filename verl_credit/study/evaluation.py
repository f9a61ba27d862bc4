"""A policy on held-out questions: means over questions with their intervals, and the paired difference of two policies.

A question's samples, which are not independent of each other, are averaged first. Every interval is over questions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

from verl_credit.credit.groups import SOLVED_ABOVE
from verl_credit.records.report.text import interval as wilson
from verl_credit.study.stats import Measure, interval, mean_without

ALL = "all sources"
MODES = ("greedy", "sampled")


def em(row: Mapping) -> float | None:
    return row["scores"].get("em")


def is_right(row: Mapping) -> bool:
    """Exact match, or a solved row's outcome where the reward function gives no exact match."""
    return (row["outcome"] if em(row) is None else em(row)) > SOLVED_ABOVE


def answered(row: Mapping) -> float | None:
    """None in an environment, which has no answers."""
    if row.get("in_environment"):
        return None
    return row["scores"].get("format_ok", float(row["stop_reason"] == "answer"))


MEASURES: dict[str, Callable[[Mapping], float | None]] = {
    "em": em,
    "f1": lambda row: row["scores"].get("f1"),
    "return": lambda row: row["scores"].get("return"),
    "steps": lambda row: row["scores"].get("steps"),
    "answered": answered,
    "calls": lambda row: float(row["calls"]),
    "reward": lambda row: row["outcome"],
}
"""The measures of a trajectory; None where the reward function does not give it."""
IN_ENVIRONMENT, ELSEWHERE = ("return", "steps"), ("f1", "answered")
"""The measures of trajectories in an environment alone, and of all others."""


def pass_at(k: int, n: int, right: int) -> float:
    """The probability that one of k samples is right, unbiased from n >= k samples (Chen et al. 2021):

        1 - C(n - right, k) / C(n, k)

    k = 1 is the mean of the samples.
    """
    return 1.0 - comb(n - right, k) / comb(n, k)


@dataclass(frozen=True)
class Measured:
    """A measure of a data source in a mode: a value for each question, and their mean. ``share``: every trajectory's value
    is in [0, 1], and so is the interval."""

    source: str
    mode: str
    name: str
    by_question: dict[str, float]
    share: bool = False

    @property
    def key(self) -> tuple[str, str, str]:
        return self.source, self.mode, self.name

    @property
    def mean(self) -> Measure:
        """With Wilson's interval where every question has 0 or 1. Other values in [0, 1] have it, too, for as many questions
        of 0 and 1 as would have the standard error of their mean:

            n = p (1 - p) / se²
        """
        values = list(self.by_question.values())
        if values and set(values) <= {0.0, 1.0}:
            share = sum(values) / len(values)
            return Measure(share, *wilson(share, len(values)), len(values))
        found = mean(values)
        if not self.share or found.low is None:
            return found
        of_two = found.value * (1 - found.value) * len(values) / np.var(values, ddof=1)
        return Measure(found.value, *wilson(found.value, of_two), len(values))

    def as_dict(self) -> dict:
        return _named(self.key) | _numbers("mean", self.mean)


def mean(values: Sequence[float]) -> Measure:
    """The mean with the jackknife's interval, which is the mean ± 1.96 standard errors.

    There is no interval for fewer than 3 values, nor for values that are all equal: their spread is not known.
    """
    if len(values) < 3 or np.ptp(values) < 1e-12:
        return Measure(float(np.mean(values)) if len(values) else None, n=len(values))
    return interval(mean_without(np.asarray(values, dtype=np.float64)))


def _named(key: tuple[str, str, str]) -> dict:
    return dict(zip(("source", "mode", "measure"), key, strict=True))


def _numbers(name: str, found: Measure) -> dict:
    return {"questions": found.n, name: found.value, "low": found.low, "high": found.high}


def measure(rows: Sequence[Mapping]) -> list[Measured]:
    """The measures of the rows of `host.step.held_out.held_out_rows`, by data source and mode, then of all sources.

    A row with a tool fault is left out, because the policy did not cause the fault. pass@k is for k of 2, 4, 8 ... and the
    number of samples, as far as every question has so many.
    """
    rows = [row for row in rows if not row["tool_fault"]]
    sources = sorted({row["source"] for row in rows})
    found = []
    for source in [*sources, *([ALL] if len(sources) > 1 else [])]:
        for mode in MODES:
            questions: dict[str, list[Mapping]] = {}
            for row in rows:
                if row["mode"] == mode and source in (ALL, row["source"]):
                    questions.setdefault(row["id"], []).append(row)
            found += [Measured(source, mode, *one) for one in _of_questions(questions)] if questions else []
    return found


def _of_questions(questions: Mapping[str, Sequence[Mapping]]) -> Iterable[tuple[str, dict[str, float], bool]]:
    fewest = min(map(len, questions.values()))
    for name, value_of in MEASURES.items():
        values = {id_: [value_of(row) for row in rows] for id_, rows in questions.items()}
        if not any(None in of for of in values.values()):
            share = name != "calls" and all(0.0 <= value <= 1.0 for of in values.values() for value in of)
            yield name, {id_: sum(of) / len(of) for id_, of in values.items()}, share
    for k in sorted({2**power for power in range(1, fewest.bit_length())} | {fewest}):
        if 1 < k <= fewest:
            right = {id_: sum(map(is_right, rows)) for id_, rows in questions.items()}
            yield (
                f"pass@{k}",
                {id_: pass_at(k, len(rows), right[id_]) for id_, rows in questions.items()},
                True,
            )


def not_measured(rows: Sequence[Mapping]) -> list[str]:
    """A line for each measure that `measure` leaves out because some trajectories have none: a mean over the others would be
    of a selection that the reward function made."""
    of: dict[tuple[str, str], list[Mapping]] = {}
    for row in rows:
        if not row["tool_fault"]:
            of.setdefault((row["source"], row["mode"]), []).append(row)
    return [
        f"{source}, {mode}: no {name}, because {lacking} of {len(some)} trajectories have none from the reward function"
        for (source, mode), some in sorted(of.items())
        for name, value_of in MEASURES.items()
        if name not in (ELSEWHERE if any(row.get("in_environment") for row in some) else IN_ENVIRONMENT)
        if (lacking := sum(value_of(row) is None for row in some))
    ]


@dataclass(frozen=True)
class Paired:
    """A measure of two policies on the questions that both answered. ``difference``: A minus B, question by question."""

    key: tuple[str, str, str]
    difference: Measure
    a: float
    b: float
    a_higher: int
    b_higher: int

    def as_dict(self) -> dict:
        counts = {"a": self.a, "b": self.b, "a_higher": self.a_higher, "b_higher": self.b_higher}
        return _named(self.key) | _numbers("difference", self.difference) | counts


def paired(a: Sequence[Measured], b: Sequence[Measured]) -> list[Paired]:
    """Measures that only one of them has are left out, and so are measures without a common question."""
    others, found = {one.key: one.by_question for one in b}, []
    for one in a:
        ours, theirs = one.by_question, others.get(one.key, {})
        if common := sorted(ours.keys() & theirs.keys()):
            a_Q, b_Q = (np.array([of[id_] for id_ in common]) for of in (ours, theirs))
            d_Q = a_Q - b_Q
            counts = int((d_Q > 1e-12).sum()), int((d_Q < -1e-12).sum())
            found.append(Paired(one.key, mean(d_Q), float(a_Q.mean()), float(b_Q.mean()), *counts))
    return found
