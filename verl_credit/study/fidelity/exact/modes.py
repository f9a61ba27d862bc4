"""What stands in the table: every registered outcome operator and turn mode, some with other options, and two controls."""

from __future__ import annotations

from verl_credit.credit.outcome import OUTCOME_OPERATORS
from verl_credit.study.fidelity.exact.objectives import (
    arcsine,
    log_success,
    reward,
    with_gain,
    with_turn_penalty,
)
from verl_credit.study.fidelity.exact.subjects import (
    Credit,
    constant_credit,
    outcome_credit_of,
    turn_credit_of,
    turn_penalty,
)

PENALTY = 0.1
OBJECTIVES = {
    "": None,
    "r": reward,
    "log p, n - 1 terms": log_success,
    "2 arcsin sqrt(p), large groups": arcsine,
}
"""What an outcome operator may name as its `objective`."""
UNBIASED = "turn-group-unbiased"


def _adds_gain(mode: str, label: str, weight: float = 1.0, **options) -> Credit:
    gamma = options.get("gamma", 1.0)
    gain = "gain" if gamma == 1 else f"discounted gain (gamma {gamma:g})"
    own_name = f"r + {gain}" if weight == 1 else f"r + {weight:g} {gain}"
    return turn_credit_of(mode, label, own=with_gain(weight, gamma), own_name=own_name, **options)


def all_credits() -> list[Credit]:
    """Outcome operators, turn modes, controls. Token operators are left out: one token a turn leaves them nothing to weigh.

    ``own``: the objective that the mode's documentation names, or that follows from its equation with 0/1 outcomes.
    """
    return [
        *(
            outcome_credit_of(name, own=OBJECTIVES[operator.objective], own_name=operator.objective)
            for name, operator in OUTCOME_OPERATORS.items()
        ),
        outcome_credit_of("grpo", "grpo, no std", norm_by_std=False, own=reward, own_name="r"),
        turn_credit_of("joint"),
        turn_credit_of("joint", "joint, no std", norm_by_std=False),
        turn_credit_of("separate"),
        turn_credit_of("turn-group"),
        turn_credit_of("turn-group-v1d", "turn-group-v1d, alpha .3", alpha=0.3),
        turn_credit_of("turn-group-v1d", "turn-group-v1d, alpha 1", alpha=1.0),
        turn_credit_of("turn-group-v1d", "turn-group-v1d, alpha 1, no std", alpha=1.0, norm_by_std=False),
        _adds_gain(UNBIASED, f"{UNBIASED}, alpha .3", 0.3, alpha=0.3),
        _adds_gain(UNBIASED, f"{UNBIASED}, alpha 1", alpha=1.0),
        _adds_gain(UNBIASED, f"{UNBIASED}, alpha 1, gamma .9", alpha=1.0, gamma=0.9),
        _adds_gain("leave_one_out", "leave_one_out"),
        _adds_gain("leave_one_out", "leave_one_out, present_only", baseline="present_only"),
        turn_credit_of("mt_grpo"),
        turn_credit_of("gigpo", own=reward, own_name="r"),
        turn_credit_of("hgpo", own=reward, own_name="r"),
        turn_credit_of("progress"),
        _adds_gain("turn_gae", "turn_gae"),
        _adds_gain("turn_gae", "turn_gae, lam .9", lam=0.9),
        turn_credit_of(
            "turn_gae", "turn_gae, lam .9, no gains", gains=False, lam=0.9, own=reward, own_name="r"
        ),
        turn_penalty(PENALTY, own=with_turn_penalty(PENALTY)),
        constant_credit(),
    ]
