"""Stops: a run must not go on as if nothing had happened. Each says what happened and what to do."""

from __future__ import annotations

from collections import Counter

from verl_credit.errors import IntegrityError
from verl_credit.redact import redact
from verl_credit.turns.assign import StepCredit
from verl_credit.turns.signals import turns_with


def check_tool_faults(lost: Counter, rows: int, tolerated_share: float, url) -> None:
    """Rows lost to a tool (by fault code) are masked out; too many and the step teaches nothing real."""
    if lost.total() > tolerated_share * rows:
        kinds = ", ".join(f"{count} {code}" for code, count in lost.most_common())
        up = " Is the server up? (GET URL/readyz)" if url else ""
        raise IntegrityError(
            f"{lost.total()} of {rows} rows were lost to faults of {_server(url)}: {kinds}; "
            f"a share of {tolerated_share:g} is tolerated (faults.max_tool_faults).{up}"
        )


def check_evaluation_faults(metrics: dict, tolerated_share: float, url) -> None:
    """Held-out rows lost to the search server count as wrong answers: too many and the evaluation means nothing."""
    for name, share in metrics.items():
        if name.endswith("/tool_fault/mean@1") and share > tolerated_share:
            raise IntegrityError(
                f"held-out evaluation: {name} = {share:.3f} of the rows were lost to faults of {_server(url)}; "
                f"a share of {tolerated_share:g} is tolerated (faults.max_tool_faults)"
            )


def _server(url: str | None) -> str:
    """Without a search server a fault is that of a tool in an agent loop of the user's."""
    return f"the search server at {redact(url)}" if url else "tools"


def check_turns_have_rewards(step: StepCredit, names: set[str]) -> None:
    """Called for the first step that measures these turn signals: one that reaches no turn would do nothing."""
    settings = step.settings
    mask = step.rewarded_B_K
    mode = f"algorithm.info_gain_norm_mode={settings.algorithm.info_gain_norm_mode}"
    if not bool(mask.any()):
        first = settings.algorithm.info_gain_first_turn
        raise IntegrityError(
            f"{mode}, but none of the {int(step.tables.valid_B.sum())} trajectories of the step has a turn with a reward "
            f"({', '.join(settings.turn_signals)}): the policy calls no tool (chat template? tool format?), its tools give "
            f"none, or info_gain_first_turn={first} leaves single-search rows without a gain"
        )
    for name in sorted(names):
        if step.metrics.get(turns_with(name)) == 0:
            raise IntegrityError(
                f"turn signal {name!r} gave no reward in the first step that measures it: every turn's reward comes from "
                f"{', '.join(each for each in settings.turn_signals if each != name)} alone; leave it out of "
                "algorithm.turn_signals, or see that it gives some"
            )
    if settings.dynamic_clip and not bool((step.credit.clip_scale_B_K[mask] != 1).any()):
        raise IntegrityError(
            "policy_loss.dynamic_clip=true, but every clip scale of the step is exactly 1: "
            "no turn's reward differs from those of its group (rollout.n too small? a signal that is the same everywhere?)"
        )


def check_states_are_shared(step: StepCredit) -> None:
    """Called for the first step: states that no second turn starts from leave the mode without its own part."""
    counts = step.credit.counts
    if counts.get("states", 1) == counts.get("states_of_one", 0):
        a = step.settings.algorithm
        raise IntegrityError(
            f"algorithm.info_gain_norm_mode={a.info_gain_norm_mode} compares turns that start from the same state, but none "
            f"of the {counts['states']} states of the step has a second turn (algorithm.turn_anchor={a.turn_anchor}, "
            f"turn_anchor_similarity={a.turn_anchor_similarity})"
        )


def check_planning_has_signal(step: StepCredit) -> None:
    """Called for the first step: a planning mask without a single token leaves HICRA and SEPA without effect."""
    if step.metrics.get("credit/planning/token_share") == 0:
        pipeline = step.settings.algorithm
        raise IntegrityError(
            f"algorithm.transform_mode={pipeline.transform_mode} needs planning tokens, but "
            f"algorithm.planning.detector={pipeline.planning.detector} found none in the first step: the policy's texts "
            "contain none of the phrases looked for (algorithm.strategic_grams, algorithm.planning.threshold)"
        )
