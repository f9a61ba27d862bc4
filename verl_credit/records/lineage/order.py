"""Which of some trials is the best, which were kept, which led to one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from verl_credit.records.lineage.trial import FailureLabel, Trial


def best_of(trials: Iterable[Trial], *, lower_is_better: bool) -> Trial | None:
    """The best metric among ``keep`` and ``baseline``, the first of equals; None where none of them has a metric."""
    kept = [trial for trial in trials if trial.status.is_kept and trial.core_metric is not None]
    pick = min if lower_is_better else max
    return pick(kept, key=lambda trial: trial.core_metric, default=None)


def keeps_of(trials: Iterable[Trial], *, lower_is_better: bool) -> tuple[Trial, ...]:
    """Those with status ``keep``, best first; without a metric they come last, whichever direction is better."""
    sign = 1 if lower_is_better else -1
    kept = [trial for trial in trials if trial.status is FailureLabel.KEEP]
    return tuple(sorted(kept, key=lambda t: (t.core_metric is None, sign * (t.core_metric or 0.0))))


def last(trials: Sequence[Trial], n: int) -> tuple[Trial, ...]:
    return tuple(trials[-n:]) if n > 0 else ()


def chain(trials: Iterable[Trial], exp_id: str) -> tuple[Trial, ...]:
    """From the root to ``exp_id`` along ``parent_exp``, whatever the status.

    It ends at a parent that is not there, and at a circle. Of rows with one id the last counts. Raises KeyError where
    ``exp_id`` has no row.
    """
    by_id = {trial.exp_id: trial for trial in trials}
    found = {exp_id: by_id[exp_id]}
    parent = by_id[exp_id].parent_exp
    while parent in by_id and parent not in found:
        found[parent] = by_id[parent]
        parent = by_id[parent].parent_exp
    return tuple(reversed(found.values()))
