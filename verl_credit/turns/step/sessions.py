"""Rollouts that return several outputs: verl's key of a row is PROMPT_SESSION_OUTPUT, and a session is one rollout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from verl_credit.config.settings import CreditSettings
from verl_credit.errors import IntegrityError

VERLS = "grpo"
"""verl's own estimator that knows sessions; every other one of verl's counts each output as a rollout."""


def session_of(key: str) -> str:
    return key.rpartition("_")[0]


def sessions_of(keys: Sequence[str]) -> list[list[int]]:
    """The places of each session's outputs among verl's keys, in the order of the outputs' numbers."""
    places: dict[str, list[int]] = defaultdict(list)
    for place, key in enumerate(keys):
        places[session_of(key)].append(place)
    return [sorted(rows, key=lambda row: int(keys[row].rpartition("_")[2])) for rows in places.values()]


def check_outputs(keys: Sequence[str], settings: CreditSettings) -> None:
    """Raises IntegrityError for a rollout with several outputs, whose credit would be wrong."""
    several = next((rows for rows in sessions_of(keys) if len(rows) > 1), None)
    estimator = settings.algorithm.adv_estimator
    if several is None or estimator == VERLS:
        return
    session = session_of(keys[several[0]])
    raise IntegrityError(
        f"row {several[1]}: its agent loop returned {len(several)} outputs of one rollout ({session}), and "
        f"algorithm.adv_estimator={estimator} takes each for a rollout of its own; expected one output, or "
        f"algorithm.adv_estimator={VERLS}"
    )
