"""What runs say about a difference: numbers worked by hand, sign flips counted one by one, planted and absent effects."""

import itertools
import math
import random

import pytest

from verl_credit.study.campaign.file import fewest_pairs
from verl_credit.study.campaign.state import area
from verl_credit.study.campaign.statistics import Comparison, compare, holm, mean, pairs_needed, verdict


@pytest.mark.parametrize(
    "window, expected",
    [
        ((0, 30), (0.3 * 10 + 0.6 * 20) / 30),  # trapezoids by hand
        (
            (5, 20),
            (0.35 * 5 + 0.5 * 10) / 15,
        ),  # ends .3 and .6 are interpolated, what is behind counts for nothing
        ((12, 14), 0.46),  # inside one piece
    ],
)
def test_the_area_is_the_mean_height_of_the_curve(window, expected):
    assert area([0, 10, 30], [0.2, 0.4, 0.8], *window) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    "steps, window, said",
    [
        ([5, 30], (0, 30), "values from step 5 to 30 do not cover the window 0 to 30"),
        ([0, 20], (0, 30), "values from step 0 to 20 do not cover"),
        ([], (0, 30), "no values"),
    ],
)
def test_nothing_is_extrapolated(steps, window, said):
    with pytest.raises(ValueError, match=said):
        area(steps, [0.5] * len(steps), *window)


def test_an_interval_holds_the_mean_and_lies_within_the_values():
    found = mean([0.1, 0.4, 0.2, 0.9, 0.3])
    assert found.mean == pytest.approx(0.38)
    assert 0.1 < found.low < found.mean < found.high < 0.9
    shifted = mean([v + 5 for v in (0.1, 0.4, 0.2, 0.9, 0.3)])
    assert (shifted.low, shifted.high) == pytest.approx((found.low + 5, found.high + 5))
    # skewed to the right: BCa reaches further to that side, a percentile interval of normal form would not
    assert found.high - found.mean > found.mean - found.low


@pytest.mark.parametrize(
    "values, why",
    [([], "no values"), ([0.1, 0.2], "at least 3 values"), ([0.1 + 0.2, 0.3, 0.3], "all values are equal")],
)
def test_an_interval_that_there_is_not_says_why(values, why):
    found = mean(values)
    assert (found.low, found.high) == (None, None) and why in found.why


def test_what_is_no_number_is_refused():
    with pytest.raises(ValueError, match="not a number"):
        mean([0.1, math.nan, 0.3])


def runs(values):
    return {(seed, 0): value for seed, value in enumerate(values)}


def differences(values):
    return compare("a", "b", runs(values), runs([0.0] * len(values)))


def by_hand(values):
    """The share of the 2^n sign flips whose mean is as far from 0 or farther."""
    observed = abs(sum(values))
    signs = itertools.product((1, -1), repeat=len(values))
    flips = [sum(s * v for s, v in zip(row, values, strict=True)) for row in signs]
    return sum(abs(total) >= observed - 1e-9 for total in flips) / len(flips)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_p_is_the_share_of_sign_flips_that_are_as_far(n):
    draw = random.Random(n)
    for _ in range(5):
        values = [draw.gauss(0.3, 1) for _ in range(n)]
        found = differences(values)
        assert found.p == pytest.approx(by_hand(values))
        assert found.p >= found.smallest_p - 1e-12


def test_p_at_best():
    assert differences([0.1, 0.2, 0.4]).p == differences([0.1, 0.2, 0.4]).smallest_p == 0.25
    assert differences([0.1]).p == 1.0 and differences([0.0, 0.0, 0.0]).p == 1.0
    assert differences([]).p is None
    # 2^-1023; 2^1024 is more than a float holds
    assert differences([0.0] * 1024).smallest_p == math.ldexp(1.0, -1023)


def test_runs_are_paired_by_what_they_share():
    a = {(1, 0): 0.5, (2, 0): 0.7, (3, 0): 0.9}
    b = {(3, 0): 0.6, (1, 0): 0.4, (9, 9): 0.0}
    found = compare("a", "b", a, b)
    assert found.n == 2 and found.difference.mean == pytest.approx((0.1 + 0.3) / 2)
    assert found.d_z == pytest.approx(0.2 / math.sqrt(0.02))


def test_the_order_of_runs_changes_nothing():
    draw = random.Random(0)
    a, b = ([draw.random() for _ in range(18)] for _ in range(2))
    order = list(range(18))
    draw.shuffle(order)
    shuffled = compare("a", "b", {k: a[k] for k in order}, {k: b[k] for k in reversed(order)})
    straight = compare("a", "b", dict(enumerate(a)), dict(enumerate(b)))
    assert shuffled == straight  # more pairs than are flipped one by one


def with_p(*ps):
    return [Comparison(str(i), "b", mean([0.1, 0.2, 0.4]), p, 1.0, "") for i, p in enumerate(ps)]


def test_holm_by_hand():
    adjusted = [c.p_holm for c in holm(with_p(0.01, 0.04, 0.03))]
    assert adjusted == pytest.approx([0.03, 0.06, 0.06])  # 3 x .01; then 2 x .03; then max(.06, .04)


def test_a_comparison_without_pairs_still_counts_in_the_family():
    first, second = holm(with_p(0.03, None))
    assert first.p_holm == pytest.approx(0.06) and second.p_holm is None
    assert holm([]) == []


@pytest.mark.parametrize("family, pairs", [(1, 6), (5, 8), (7, 9), (28, 11)])
def test_the_fewest_pairs_that_can_resolve(family, pairs):
    assert fewest_pairs(family) == pairs
    assert family * 2 / 2**pairs <= 0.05 < family * 2 / 2 ** (pairs - 1)


def test_pairs_for_80_percent():
    # d_z = .5 at 5 %: 34 pairs, the value of every textbook (33.4 rounded up)
    values = [0.5 + x for x in (-1, 1)]
    scale = math.sqrt(sum((v - 0.5) ** 2 for v in values))
    half = differences([0.5 + x / scale for x in (-1, 1)])
    assert half.d_z == pytest.approx(0.5) and pairs_needed(half, 1) == 34
    assert pairs_needed(half, 5) > 34
    assert pairs_needed(differences([1.0, 1.001, 0.999]), 5) == fewest_pairs(5)  # d_z = 1000
    assert "more than 10000 pairs" in pairs_needed(differences([1.0, -1.0, 1e-6]), 1)
    assert "all differences are equal" in pairs_needed(differences([0.25, 0.25]), 1)


def test_a_planted_effect_is_found_and_named():
    draw, pairs = random.Random(1), range(9)
    shifted = {"planted": 0.2, "same": 0.0}
    values = {name: runs([shift + draw.gauss(0, 0.1) for _ in pairs]) for name, shift in shifted.items()}
    found = holm([compare(name, "base", of, runs([0.0] * 9)) for name, of in values.items()])
    assert "planted is better" in verdict(found[0], 2)
    assert "base is better" in verdict(found[0], 2, higher_is_better=False)
    assert "not resolved (p = " in verdict(found[1], 2)


def test_nothing_is_decided_before_all_pairs_are_there():
    (clear,) = holm([differences([0.5 + i / 100 for i in range(9)])])
    assert "a is better" in verdict(clear, 1)
    assert verdict(clear, 1, missing=3) == "a against b: not resolved yet: 3 of 12 pairs are missing."
    assert "9 pairs, 2 lost to failed runs" in verdict(clear, 1, lost=2)
    assert "there is no pair" in verdict(differences([]), 1)


@pytest.mark.slow
def test_without_an_effect_at_most_one_in_twenty_is_found():
    """All 128 signs that seven differences can have are alike under the null: 6 of them, 4.7 %, reach p <= .05."""
    sizes = [0.31, 0.02, 0.55, 0.13, 0.27, 0.41, 0.08]
    signs = itertools.product((1, -1), repeat=7)
    found = [differences([s * v for s, v in zip(row, sizes, strict=True)]).p for row in signs]
    assert sum(p <= 0.05 for p in found) == 6 and min(found) == 2 / 128
