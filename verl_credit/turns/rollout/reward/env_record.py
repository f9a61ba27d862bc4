"""The record of a rollout in an environment (`env_agent`): its faults, its outcome, and what the reward function returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from verl_credit.turns.rollout.reward.golds import gold_answers

FAULTS = ("env_raised", "env_deadline", "env_lost", "env_bad_answer", "env_differs")
"""``tool_fault`` of a row whose environment raised, was late, lost its process, broke the protocol, or began otherwise than
the row says."""


def outcome_record(
    rewards: Sequence[float | None], *, said: bool | None, ended: bool, outcome: str, success_at: float | None
) -> dict[str, float]:
    """The return, the last reward, the success and the score (`environment.outcome`) of a rollout.

    return = the sum of the rewards that there are; success = what the environment says, else return >= success_at. A rollout
    that did not end by itself (``ended``) without either is no success. Raises ValueError where an ended one has neither.
    """
    earned = [reward for reward in rewards if reward is not None]
    found = {"return": float(sum(earned)), "last": (rewards[-1] or 0.0) if rewards else 0.0}
    if said is None and success_at is not None:
        said = found["return"] >= success_at
    if said is None and ended:
        use = "the environment ended and did not say whether that is a success; set it to the return of a success"
        raise ValueError(f"environment.success_at=None: {use}")
    found["success"] = float(bool(said))
    return found | {"score": found[outcome]}


def scores(record: Mapping) -> dict[str, float]:
    """What verl's reward function returns for a row of an environment. ``em`` is the success, which evaluations, alarms and
    `fidelity` read as an exact match."""
    found = record["environment"]
    return {
        "score": found["score"],
        "em": found["success"],
        "return": found["return"],
        "steps": found["steps"],
        "bad_actions": float(record["bad_calls"]),
        "tool_fault": float(bool(record["tool_fault"])),
    }


def golds_of(record: Mapping, ground_truth: object) -> list[str]:
    """The row's gold answers. A row of an environment has none. Raises ValueError as `gold_answers` does."""
    return [] if record.get("environment") else gold_answers(ground_truth)
