"""Stops: a run must not go on as if nothing had happened. Each says what happened and what to do."""

from __future__ import annotations

from collections import Counter

import torch

from verl_credit.host.credit_step import TurnStep


class IntegrityError(RuntimeError):
    """The run's numbers could not be trusted if it went on."""


def check_rollouts(expected: int, arrived: int, errors: list[str], tolerated_share: float) -> int:
    """Number of rollouts that never arrived. Raises when their share is above what the user tolerates."""
    failed = max(expected - arrived, len(errors))
    if failed > tolerated_share * expected:
        first = errors[0] if errors else "no exception was recorded; see the Ray worker logs"
        raise IntegrityError(
            f"{failed} of {expected or failed} rollouts raised (an agent loop or the reward function), "
            f"faults.max_failed_rollouts={tolerated_share:g} tolerates a share of {tolerated_share:g}. "
            f"First error: {first}"
        )
    return failed


def check_tool_faults(records: list[dict], tolerated_share: float, url) -> None:
    """Rows lost to the search server are masked out; too many of them and the step teaches nothing real."""
    codes = Counter(record["tool_fault"] for record in records if record["tool_fault"])
    lost = sum(codes.values())
    if lost > tolerated_share * len(records):
        raise IntegrityError(
            f"{lost} of {len(records)} rows were lost to faults of the search server at {url}: {dict(codes)}; "
            f"faults.max_tool_faults={tolerated_share:g}. Is the server up? (GET <url>/readyz)"
        )


def check_gain_has_signal(step: TurnStep) -> None:
    """Called for the first step: information gain that reaches no turn is switched on and does nothing."""
    settings = step.settings
    if not settings.scores_gain:
        return
    mask = step.turn_mask_B_K & step.row_valid_B[:, None]
    if not bool(mask.any()):
        raise IntegrityError(
            f"algorithm.info_gain_norm_mode={settings.info_gain_norm_mode}, but none of the "
            f"{int(step.row_valid_B.sum())} trajectories of the first step has a turn with an information gain: "
            "the policy calls no tool (chat template? tool format?), or "
            f"info_gain_first_turn={settings.info_gain_first_turn} leaves single-search rows without one"
        )
    if settings.dynamic_clip and not bool((step.credit.clip_scale_B_K[mask] != 1).any()):
        raise IntegrityError(
            "policy_loss.dynamic_clip=true, but every clip scale of the first step is exactly 1: "
            "no turn differs from its group (rollout.n too small?)"
        )


def check_finite(name: str, values: torch.Tensor) -> None:
    if not bool(values.isfinite().all()):
        raise IntegrityError(f"{name} holds values that are not finite")
