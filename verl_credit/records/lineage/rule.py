"""The rules of a lineage: the best trial, the kept trials, the chain to a trial, and whether a finished trial is kept."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from verl_credit.records.lineage.trial import FailureLabel, Trial


def best_of(trials: Iterable[Trial], *, lower_is_better: bool) -> Trial | None:
    """The best metric among ``keep`` and ``baseline``, the first of equals; None where none of them has a metric."""
    kept = [trial for trial in trials if trial.status.is_kept and trial.core_metric is not None]
    pick = min if lower_is_better else max
    return pick(kept, key=lambda trial: trial.core_metric, default=None)


def keeps_of(trials: Iterable[Trial], *, lower_is_better: bool) -> tuple[Trial, ...]:
    """Returns the trials with status ``keep``, best first; trials without a metric come last in both directions."""
    sign = 1 if lower_is_better else -1
    kept = [trial for trial in trials if trial.status is FailureLabel.KEEP]
    return tuple(sorted(kept, key=lambda t: (t.core_metric is None, sign * (t.core_metric or 0.0))))


def last(trials: Sequence[Trial], n: int) -> tuple[Trial, ...]:
    return tuple(trials[-n:]) if n > 0 else ()


def chain(trials: Iterable[Trial], exp_id: str) -> tuple[Trial, ...]:
    """Returns the trials from the root to ``exp_id`` along ``parent_exp``, with any status.

    The walk to the root ends at a missing parent and at a circle. Among rows with one id the last is used. Raises KeyError
    when ``exp_id`` has no row.
    """
    by_id = {trial.exp_id: trial for trial in trials}
    chained = {exp_id: by_id[exp_id]}
    parent = by_id[exp_id].parent_exp
    while parent in by_id and parent not in chained:
        chained[parent] = by_id[parent]
        parent = by_id[parent].parent_exp
    return tuple(reversed(chained.values()))


class Verdict(NamedTuple):
    status: FailureLabel
    delta_vs_best: float | None
    why: str


def verdict(
    metric: float | None, trials: Iterable[Trial], *, threshold: float, lower_is_better: bool
) -> Verdict:
    """``keep`` where the gain over the best kept trial exceeds ``threshold``, else ``discard``.

        gain = metric − best, its sign turned where lower is better

    The first trial with a metric is the ``baseline``: there is nothing to compare it with. One without a metric is
    discarded. A gain of the threshold itself, within 1e-12, does not exceed it.
    """
    if metric is None:
        return Verdict(FailureLabel.DISCARD, None, "no held-out metric")
    best = best_of(trials, lower_is_better=lower_is_better)
    if best is None:
        return Verdict(FailureLabel.BASELINE, None, "the first trial with a metric")
    delta = metric - best.core_metric
    gain = -delta if lower_is_better else delta
    kept = gain > threshold and not math.isclose(gain, threshold, abs_tol=1e-12)
    reason = f"gain {gain:+.6g} over {best.label}, {'above' if kept else 'not above'} {threshold:g}"
    return Verdict(FailureLabel.KEEP if kept else FailureLabel.DISCARD, delta, reason)
