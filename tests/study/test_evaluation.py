"""Measures of an evaluation: over questions, not over trajectories, and paired by question."""

from itertools import combinations

import numpy as np
import pytest

from verl_credit.records.report.text import interval as wilson
from verl_credit.study.evaluation import ALL, Measured, mean, measure, not_measured, paired, pass_at


def row(id_, em, *, source="nq", mode="sampled", fault="", scores=None, calls=1):
    given = {"em": em, "f1": em / 2, "format_ok": 1.0} if scores is None else scores
    return {
        "id": id_, "source": source, "mode": mode, "outcome": em, "scores": given, "calls": calls,
        "stop_reason": "answer", "tool_fault": fault,
    }  # fmt: skip


def measured(rows):
    return {one.key: one for one in measure(rows)}


@pytest.mark.parametrize("n, right", [(1, 0), (1, 1), (4, 0), (4, 1), (4, 3), (5, 2), (6, 6)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n, right):
    samples = [1] * right + [0] * (n - right)
    for k in range(1, n + 1):
        share = np.mean([any(drawn) for drawn in combinations(samples, k)])
        assert pass_at(k, n, right) == pytest.approx(share)
    assert pass_at(1, n, right) == pytest.approx(right / n)


def test_a_question_counts_once_however_many_samples_it_has():
    """1 of 1 and 1 of 4: the mean over questions is 5/8, over trajectories it would be 2/5."""
    rows = [row("p", 1.0), row("q", 1.0), *(row("q", 0.0) for _ in range(3))]
    em = measured(rows)["nq", "sampled", "em"]
    assert em.by_question == {"p": 1.0, "q": 0.25} and em.mean.value == 0.625 and em.mean.n == 2


def test_four_samples_have_pass_at_two_and_four():
    rows = [row("p", em) for em in (1.0, 0.0, 0.0, 0.0)] + [row("q", em) for em in (0.0,) * 4]
    found = measured(rows)
    names = [name for _, _, name in found]
    assert names == ["em", "f1", "answered", "calls", "reward", "pass@2", "pass@4"]
    assert found["nq", "sampled", "pass@2"].by_question == {"p": pytest.approx(0.5), "q": 0.0}
    assert found["nq", "sampled", "pass@4"].by_question == {"p": 1.0, "q": 0.0}
    six = measured([row("p", 1.0) for _ in range(6)])
    assert [name for *_, name in six if name.startswith("pass")] == ["pass@2", "pass@4", "pass@6"]


def test_sources_and_modes_stand_apart_and_all_sources_together():
    rows = [row("p", 1.0), row("q", 0.0, source="hotpot"), row("q", 1.0, source="hotpot", mode="greedy")]
    values = {key[:2]: one.mean.value for key, one in measured(rows).items() if key[2] == "em"}
    sampled, greedy = ("hotpot", "sampled"), ("hotpot", "greedy")
    assert values[greedy] == values[ALL, "greedy"] == 1.0
    assert values[sampled] == 0.0 and values["nq", "sampled"] == 1.0 and values[ALL, "sampled"] == 0.5


def test_a_row_with_a_fault_is_left_out():
    found = measured([row("p", 1.0), row("p", 0.0, fault="connect"), row("q", 0.0, fault="connect")])
    assert found["nq", "sampled", "em"].by_question == {"p": 1.0}


def test_a_reward_without_exact_match_has_no_exact_match_and_decides_what_is_right():
    rows = [row("p", outcome, scores={}) for outcome in (0.6, 0.4)]
    found = measured(rows)
    assert [name for *_, name in found] == ["answered", "calls", "reward", "pass@2"]
    assert found["nq", "sampled", "reward"].by_question == {"p": 0.5}
    assert found["nq", "sampled", "pass@2"].mean.value == 1.0


def test_a_measure_that_one_trajectory_lacks_is_left_out_aloud():
    rows = [row("p", 1.0), row("q", 1.0, scores={"f1": 1.0}), row("r", 1.0, scores={}, fault="connect")]
    assert ("nq", "sampled", "em") not in measured(rows) and ("nq", "sampled", "f1") in measured(rows)
    (line,) = not_measured(rows)
    assert line == "nq, sampled: no em, because 1 of 2 trajectories have none from the reward function"
    assert not_measured([row("p", 1.0)]) == []


def test_intervals_of_values_in_0_1_stay_there_and_of_others_do_not():
    """30 questions of which one has a reward of .2: the mean - 1.96 standard errors would be below 0."""
    few = [0.2] + [0.0] * 29
    for reward, low in ((few, 0.0), ([1.0 - value for value in few], None)):
        found = measured([row(str(n), value, scores={}) for n, value in enumerate(reward)])[
            "nq", "sampled", "reward"
        ]
        assert 0.0 <= found.mean.low < found.mean.value < found.mean.high <= 1.0 and found.mean.n == 30
        assert mean(list(found.by_question.values())).low < 0 or low is None
    signed = measured([row(str(n), value - 0.1, scores={}) for n, value in enumerate(few)])[
        "nq", "sampled", "reward"
    ]
    assert signed.mean == mean(list(signed.by_question.values()))
    halves = [row(str(n), value, scores={}) for n in range(40) for value in (0.0, 1.0 if n < 2 else 0.0)]
    pass_2 = measured([*halves, row("40", 0.5, scores={}), row("40", 0.5, scores={})])[
        "nq", "sampled", "pass@2"
    ]
    assert 0.0 < pass_2.mean.low < pass_2.mean.value
    many = np.random.default_rng(0).beta(2, 2, 20_000)
    wide = Measured("nq", "sampled", "reward", dict(enumerate(many)), share=True).mean
    assert (wide.low, wide.high) == pytest.approx((mean(many).low, mean(many).high), abs=1e-5)


def test_the_interval_of_shares_is_wilsons_and_of_other_values_the_standard_error():
    right = Measured("nq", "greedy", "em", {str(n): float(n < 3) for n in range(10)}).mean
    assert (right.low, right.high) == wilson(0.3, 10)
    none = Measured("nq", "greedy", "em", {str(n): 0.0 for n in range(10)}).mean
    assert none.low == 0.0 and 0.2 < none.high < 0.35  # not [0, 0]
    values = np.random.default_rng(0).random(40)
    found, half = mean(values), 1.959964 * values.std(ddof=1) / np.sqrt(40)
    assert (found.low, found.high) == (
        pytest.approx(values.mean() - half),
        pytest.approx(values.mean() + half),
    )


@pytest.mark.parametrize("values", [[0.3], [0.3, 0.4], [0.3] * 5])
def test_there_is_no_interval_where_the_spread_is_not_known(values):
    found = mean(values)
    assert found.value == pytest.approx(np.mean(values)) and found.low is None and found.high is None


def test_a_difference_is_of_the_common_questions_and_turns_round():
    rng = np.random.default_rng(1)
    base = rng.random(30)
    a = [Measured("nq", "sampled", "em", {str(n): v for n, v in enumerate(base + 0.1)})]
    b = [Measured("nq", "sampled", "em", {str(n): v for n, v in enumerate(base + 0.02 * rng.random(30))})]
    b[0].by_question["only b"] = 100.0
    (ab,), (ba,) = paired(a, b), paired(b, a)
    assert (ab.difference.n, ab.a_higher, ab.b_higher) == (30, 30, 0)
    assert ab.difference.value == pytest.approx(ab.a - ab.b) == pytest.approx(-ba.difference.value)
    assert (ab.difference.low, ab.difference.high) == pytest.approx((-ba.difference.high, -ba.difference.low))
    # the questions' own spread, which both share, is not in it
    assert ab.difference.high - ab.difference.low < 0.1 * (mean(base).high - mean(base).low)


def test_measures_that_one_of_them_lacks_are_not_compared():
    a, b = measure([row("p", 1.0), row("p", 0.0)]), measure([row("p", 1.0)])
    assert [one.key[2] for one in paired(a, b)] == ["em", "f1", "answered", "calls", "reward"]
    assert paired(a, measure([row("q", 1.0)])) == []
