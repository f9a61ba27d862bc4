"""trace: worked numbers and the laws."""

import pytest

from kit.modes import batch
from kit.turn_lists import close, turns
from verl_credit.credit.laws import check, own_subject
from verl_credit.credit.plugins import find_turn_mode

TRACE = find_turn_mode("trace")


def test_trace_worked():
    """Outcomes 1 and 0: A_out is 1 and -1. Four tool turns, H 2, g 1/2: means over (1, 1/2) / 1.5, alone at the last one.

    The horizon reaches the end from the third turn on: 2 (1/4) A_out there and 2 (1/2) A_out in the fourth.
    """
    given, more = batch([[0.3, 0.6, 0.0, 0.9], []], [1.0, 0.0])
    options = {"horizon": 2, "horizon_gamma": 0.5, "turn_weight": 0.5, "eps": 1e-12}
    r = (0.6 / 1.5, 0.6 / 1.5, 0.45 / 1.5 + 0.5, 0.9 + 1.0)
    credit = TRACE(*given, **more, **options)
    assert turns(credit, (5, 1)) == close(([1 + each / 2 for each in r] + [1.0], (-1.0,)))
    twice = TRACE(*given, **more, **options, outcome_weight=2.0, end_bonus=0.0)
    plain = (0.4, 0.4, 0.3, 0.9)
    assert turns(twice, (5, 1)) == close(([2 + each / 2 for each in plain] + [2.0], (-2.0,)))


def test_trace_leaves_a_missing_reward_out_of_its_means_and_gives_nothing_where_none_is_known():
    """H 2, g 1: means over what is known; the last two turns know nothing, and have no end's part either."""
    given, more = batch([[None, 0.4, float("nan"), None], []], [1.0, 0.0])
    credit = TRACE(*given, **more, horizon=2, horizon_gamma=1.0, turn_weight=1.0, eps=1e-12)
    assert turns(credit, (5, 1)) == close(((1.4, 1.4, 1.0, 1.0, 1.0), (-1.0,)))
    near = TRACE(*given, **more, horizon=1, horizon_gamma=0.0, turn_weight=1.0, eps=1e-12)
    assert turns(near, (5, 1)) == close(((1.0, 1.4, 1.0, 1.0, 1.0), (-1.0,)))


@pytest.mark.slow
def test_the_laws_hold():
    findings = check(own_subject(TRACE.function, "trace", kind="turn"), seeds=range(2))
    assert not [finding.name for finding in findings if finding.wrong]
