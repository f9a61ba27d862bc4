"""Main effects and interactions: a two by two worked by hand, and tables that cannot be made."""

import pytest

from verl_credit.study.campaign.results import factorial

LEVELS = {
    "outcome": {"C1": "grpo", "C2": "grpo", "C3": "maxrl", "C4": "maxrl"},
    "token": {"C1": "none", "C2": "sepa", "C3": "none", "C4": "sepa"},
}


NOISE = ((0.01, -0.02, 0.03, 0.0), (-0.01, 0.02, 0.0, 0.01), (0.02, 0.0, -0.01, -0.03))


def campaign(outcome=0.0, token=0.0, both=0.0, noise=NOISE):
    values = {}
    for place, name in enumerate(("C1", "C2", "C3", "C4")):
        a, b = LEVELS["outcome"][name] == "maxrl", LEVELS["token"][name] == "sepa"
        values[name] = {
            (seed, 0): 0.5 + 0.1 * seed + outcome * a + token * b + both * (a and b) + row[place]
            for seed, row in enumerate(noise)
        }
    return values


def by_hand(values):
    """Sums of squares of a balanced 2 x 2 with blocks, from means alone; F of each effect on (blocks - 1) x 3 degrees."""
    blocks = len(values["C1"])
    y = {(c, s): values[c][(s, 0)] for c in values for s in range(blocks)}
    grand = sum(y.values()) / len(y)

    def between(part):
        groups = {}
        for key, value in y.items():
            groups.setdefault(part(*key), []).append(value)
        return sum(len(g) * (sum(g) / len(g) - grand) ** 2 for g in groups.values())

    main = {name: between(lambda c, _, name=name: LEVELS[name][c]) for name in LEVELS}
    cells = between(lambda c, _: c)
    total = sum((v - grand) ** 2 for v in y.values())
    rest = total - cells - between(lambda _, s: s)
    df = (blocks - 1) * 3
    sums = {**main, "outcome x token": cells - sum(main.values())}
    return {name: (s, s / (rest / df)) for name, s in sums.items()}, df


@pytest.mark.slow
def test_sums_of_squares_and_f_by_hand():
    values = campaign(outcome=0.05, token=-0.02, both=0.01)
    found = factorial(LEVELS, values)
    expected, df = by_hand(values)
    assert found.df_residual == df == 6
    assert [e.name for e in found.effects] == ["outcome", "token", "outcome x token"]
    for effect in found.effects:
        assert (effect.sum_sq, effect.f) == pytest.approx(expected[effect.name])
        assert effect.df == 1 and effect.p <= effect.p_holm <= 1


@pytest.mark.slow
def test_a_planted_effect_is_the_one_that_is_found():
    small = {e.name: e.p_holm for e in factorial(LEVELS, campaign(outcome=0.3)).effects}
    assert small["outcome"] < 0.001 < 0.05 < min(small["token"], small["outcome x token"])
    crossed = {e.name: e.p_holm for e in factorial(LEVELS, campaign(both=0.6)).effects}
    assert crossed["outcome x token"] < 0.001


def test_means_of_levels():
    means = factorial(LEVELS, campaign(outcome=0.3, noise=((0.0, 0.0, 0.0, 0.01),) * 2)).level_means
    assert means["outcome"]["maxrl"] - means["outcome"]["grpo"] == pytest.approx(0.305)


@pytest.mark.slow
def test_a_block_that_lacks_a_condition_is_left_out():
    values = campaign(outcome=0.05)
    whole = factorial(LEVELS, {c: {k: v for k, v in of.items() if k != (2, 0)} for c, of in values.items()})
    del values["C3"][(2, 0)]
    assert factorial(LEVELS, values) == whole and whole.df_residual == 3


@pytest.mark.parametrize(
    "values, why",
    [
        (
            campaign(noise=((0.0, 0.1, 0.0, 0.0),)),
            "1 (seed, world) have runs of all conditions; 2 are needed",
        ),
        ({}, "0 (seed, world)"),
        (campaign(noise=((0.0,) * 4,) * 3), "the runs do not differ beyond factors and blocks"),
    ],
)
def test_a_table_that_cannot_be_made_says_why(values, why):
    found = factorial(LEVELS, values)
    assert not found.effects and why in found.why
