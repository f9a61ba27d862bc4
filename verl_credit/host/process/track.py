"""Sends trials to verl's own loggers: every trial becomes a run of the tracker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verl.utils.tracking import Tracking

from verl_credit.errors import did_you_mean


def export_trials(
    trials: Iterable[tuple[str, Mapping[str, float], Mapping[str, Any]]], loggers: Sequence[str], project: str
) -> int:
    """Send (name, numbers, facts) of each trial; returns how many were sent.

    Numbers become metrics of step 0, facts the run's configuration. The trackers' environment (WANDB_MODE,
    MLFLOW_TRACKING_URI, ...) decides where the runs go, as in training. Raises ValueError for a logger that verl does not
    have, ImportError for one that is not installed, RuntimeError for one that did not start.
    """
    for name in loggers:
        if name not in Tracking.supported_backend:
            known = ", ".join(Tracking.supported_backend)
            raise ValueError(f"--to {name}{did_you_mean(name, Tracking.supported_backend)}: verl has {known}")
    sent = 0
    for name, numbers, facts in trials:
        tracking = Tracking(project, name, list(loggers), {"trainer": {}, **facts})
        if absent := [one for one in loggers if one not in tracking.logger]:
            raise RuntimeError(f"{', '.join(absent)} did not start; what it logged says why")
        tracking.log(dict(numbers), step=0)
        tracking.finish()
        sent += 1
    return sent
