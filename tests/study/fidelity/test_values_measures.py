"""Measures by worked numbers, and what is not defined."""

import dataclasses

import numpy as np
import pytest

from verl_credit.study.fidelity.agreements import Agreements, sure_pairs
from verl_credit.study.fidelity.true_values import ScoredTurn, Value, martingale


def turn(
    prompt,
    trajectory,
    number,
    star,
    *,
    kind="tool",
    first=None,
    second=None,
    variance=(0.0, 0.0),
    states="ab",
):
    ends = kind == "ending"
    return ScoredTurn(
        prompt=prompt,
        trajectory=trajectory,
        turn=number,
        kind=kind,
        before=f"{prompt}-{trajectory}-{states[0]}",
        after=None if ends else f"{prompt}-{trajectory}-{states[1]}",
        a_star=star,
        a_first=star if first is None else first,
        a_second=star if second is None else second,
        se=sum(variance) ** 0.5,
        variance_before=variance[0],
        variance_after=variance[1],
        gain=None if ends else 0.0,
        outcome=1.0,
    )


STARS = [0.1, 0.4, -0.2, 0.3, 0.0, -0.5]


def tool_turns():
    return [turn(i // 3, i % 3, 0, star) for i, star in enumerate(STARS)]


def test_without_noise_it_is_pearsons_correlation():
    credit = [1.0, 0.5, 0.0, 2.0, 0.0, 1.0]
    found = Agreements(tool_turns(), resamples=20).of(credit)
    assert found.pearson.value == pytest.approx(np.corrcoef(credit, STARS)[0, 1])
    assert found.pearson.n == 6
    within = [np.array(x) - np.repeat([np.mean(x[:3]), np.mean(x[3:])], 3) for x in (credit, STARS)]
    assert found.same_turn.value == pytest.approx(np.corrcoef(*within)[0, 1])


def test_turns_of_other_numbers_are_other_cells_and_endings_are_no_tool_turns():
    turns = [
        *tool_turns(),
        *(turn(0, i, 1, star) for i, star in enumerate([5.0, 7.0])),
        turn(0, 0, 2, 9.0, kind="ending"),
    ]
    credit = [*[1.0, 0.5, 0.0, 2.0, 0.0, 1.0], 3.0, 1.0, -100.0]
    found = Agreements(turns, resamples=20).of(credit)
    assert found.pearson.value == pytest.approx(np.corrcoef(credit[:-1], [*STARS, 5.0, 7.0])[0, 1])
    cells = [slice(0, 3), slice(3, 6), slice(6, 8)]
    within = [
        np.concatenate([np.array(x[c]) - np.mean(x[c]) for c in cells]) for x in (credit, [*STARS, 5.0, 7.0])
    ]
    assert found.same_turn.value == pytest.approx(np.corrcoef(*within)[0, 1])


def test_noise_of_the_values_is_corrected_on_their_side_alone():
    first, second = [0.2, 0.3, -0.4, 0.5, 0.1, -0.6], [0.0, 0.5, 0.0, 0.1, -0.1, -0.4]
    turns = [
        turn(i // 3, i % 3, 0, (a + b) / 2, first=a, second=b)
        for i, (a, b) in enumerate(zip(first, second, strict=True))
    ]
    credit = [1.0, 0.5, 0.0, 2.0, 0.0, 1.0]
    agreements = Agreements(turns, resamples=20)
    rho = np.corrcoef(first, second)[0, 1]
    assert agreements.reliability.value == pytest.approx(2 * rho / (1 + rho))
    mean = (np.array(first) + second) / 2
    wanted = np.corrcoef(credit, mean)[0, 1] / agreements.reliability.value**0.5
    assert agreements.of(credit).pearson.value == pytest.approx(wanted)


def test_constant_credit_is_not_defined_and_not_0():
    found = Agreements(tool_turns(), resamples=20).of([0.7] * 6)
    assert (found.pearson.value, found.same_turn.value, found.pairs.value) == (None, None, None)
    by_prompt = Agreements(tool_turns(), resamples=20).of([0.1] * 3 + [0.7] * 3)
    assert by_prompt.pearson.value is not None and by_prompt.same_turn.value is None


def test_reliability_that_is_rounding_gives_nothing():
    """Halves that are not correlated but for rounding: nothing is divided by that."""
    first, second = [0.1, -0.1, 0.1, -0.1], [0.1 + 1e-16, 0.1, -0.1, -0.1]
    turns = [
        turn(0, i, 0, a + b, first=a, second=b) for i, (a, b) in enumerate(zip(first, second, strict=True))
    ]
    agreements = Agreements(turns, resamples=5)
    assert agreements.reliability.value is None
    assert agreements.of([1.0, 2.0, 3.0, 5.0]).pearson.value is None


def chain(prompt, trajectory, stars, variance):
    """Turns that follow each other: the state after one is the state before the next."""
    names = "abcdefg"
    return [
        turn(prompt, trajectory, k, star, variance=(variance, variance), states=names[k : k + 2])
        for k, star in enumerate(stars)
    ]


def test_a_shared_value_counts_four_times_in_the_error_of_a_pair():
    """A*_2 - A*_1 = V(c) - 2 V(b) + V(a): 1 + 4 + 1 variances; turns 1 and 3 share none: 4."""
    turns = chain(0, 0, [0.0, 0.95, 0.85], 0.01)  # 4 sqrt(.06) = .980, 4 sqrt(.04) = .8
    assert sure_pairs(turns) == [(0, 2)]
    assert sure_pairs(chain(0, 0, [0.0, 0.985, 0.0], 0.01)) == [(0, 1), (2, 1)]
    assert sure_pairs(chain(0, 0, [0.0, 2.0], 0.01) + chain(0, 1, [9.0], 0.01)) == [(0, 1)]


def test_pairs_in_order():
    turns = [t for p in range(3) for t in chain(p, 0, [-1.0, 1.0], 0.001)]
    agreements = Agreements(turns, resamples=50)
    assert agreements.sure == (3, 0)
    assert agreements.of([0, 1, 0, 1, 1, 0]).pairs.value == pytest.approx(2 / 3)
    assert agreements.of([0, 1, 0, 1, 5, 5]).pairs.value == pytest.approx(2.5 / 3)
    assert agreements.of([3, 3, 0, 0, 5, 5]).pairs.value is None
    assert agreements.of([0, 1, 0, 1, 0, 1]).pairs.low == 1


def test_pairs_with_the_ending_turn_are_counted_apart():
    turns = [t for p in range(3) for t in chain(p, 0, [-1.0, 1.0], 0.001)]
    turns += [turn(p, 0, 2, -2.0, kind="ending", variance=(0.001, 0.0), states="c") for p in range(3)]
    turns.sort(key=lambda t: t.prompt)
    agreements = Agreements(turns, resamples=20)
    assert agreements.sure == (3, 6)
    found = agreements.of([0, 1, -1] * 2 + [0, 1, 0.5])
    assert (found.pairs.value, found.end_pairs.value) == (1, pytest.approx(5 / 6))


def test_zscores_by_hand():
    turns = [turn(0, 0, 0, 0.5), turn(1, 0, 0, 0.5), turn(1, 1, 0, -0.25), turn(0, 0, 1, 1.0, kind="ending")]
    first, second, whole = martingale(turns)
    assert (first.name, first.n, first.mean) == ("turn 1", 3, 0.25)
    assert first.z == pytest.approx(0.75 / (0.5**2 + 0.25**2) ** 0.5)
    assert second.z is None and second.mean == 1.0  # one prompt
    assert (whole.name, whole.n) == ("r - V(s_0)", 3)
    assert whole.z == pytest.approx(1.75 / (1.5**2 + 0.25**2) ** 0.5)


def test_a_value_by_hand():
    value = Value("c", "11010010")
    assert (value.value, value.halves, value.variance) == (0.5, (0.75, 0.25), 0.5 * 0.5 / 8)
    never = dataclasses.replace(value, outcomes="0" * 8)
    assert never.variance == pytest.approx((0.5 / 9) * (8.5 / 9) / 8) and never.variance > 0
