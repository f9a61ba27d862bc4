"""Is a finished trial kept? By its gain over the best trial kept before."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from verl_credit.records.lineage.order import best_of
from verl_credit.records.lineage.trial import FailureLabel, Trial


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
    said = f"gain {gain:+.6g} over {best.label}, {'above' if kept else 'not above'} {threshold:g}"
    return Verdict(FailureLabel.KEEP if kept else FailureLabel.DISCARD, delta, said)
