"""The table: which operators are in it, what a row says, and operators of one's own."""

import json

import pytest

from verl_credit.credit.laws.subjects import Result
from verl_credit.credit.outcome import OUTCOME_OPERATORS
from verl_credit.credit.turn.modes import MODES
from verl_credit.study.fidelity.exact.bias import LARGEST_OF_BATCH_SCOPE, bias_rows
from verl_credit.study.fidelity.exact.operators import Credit, all_credits, outcome_credit_of, turn_credit_of
from verl_credit.study.fidelity.exact.question import ONE_HOP, Place, Question

SMALL = Question("small", {"a": Place(0.2, 0.5, {"q": ("b", 1.0)}), "b": Place(0.6, 1.0)}, "a", 2)


def exact_bias(*given, **options):
    return list(bias_rows(*given, **options))


def test_every_outcome_operator_and_turn_mode_is_in_the_table():
    named = {credit.name.split(",")[0] for credit in all_credits()}
    expected = set(OUTCOME_OPERATORS) | (set(MODES) - {"none"})  # none is its outcome operator alone
    assert expected <= named
    assert len({credit.name for credit in all_credits()}) == len(all_credits())


@pytest.mark.slow
def test_rows_are_plain_and_complete():
    rows = exact_bias(questions=[SMALL, ONE_HOP], group_sizes=[2], stops=[0.3, 0.6])
    assert json.loads(json.dumps(rows)) == rows
    assert len(rows) == len(all_credits()) * 2 * 3
    assert {row["questions"] for row in rows} == {"small", "one hop", "small and one hop"}
    assert len({tuple(row) for row in rows}) == 1
    named = {
        "rloo",
        "low_baseline",
        "leave_one_out",
        "turn_gae",
        "turn_gae, lam .9, no gains",
        "turn penalty 0.1",
    }
    named |= {f"turn-group-unbiased, alpha {alpha}" for alpha in (".3", "1")}
    exact = [row for row in rows if row["mode"] in named]
    assert len(exact) == len(named) * 6 and all(row["own_error"] < 1e-9 for row in exact)
    beyond = {row["mode"]: row["beyond_r_and_gain"] for row in rows if row["questions"] == "one hop"}
    assert beyond["turn-group-v1d, alpha .3"] > 0.01 and beyond["turn-group-unbiased, alpha .3"] < 1e-9
    assert all((row["cosine_own"] is None) == (row["own_objective"] == "") for row in rows)
    constant = [row for row in rows if row["mode"] == "constant"]
    assert all(
        row["cosine"] is row["cosine_fewer_turns"] is row["beyond_r_and_gain"] is None for row in constant
    )


def test_a_weight_per_question_turns_the_sum_of_two_questions():
    """maxrl weighs the harder one up; each alone keeps its direction."""
    rows = exact_bias([outcome_credit_of("maxrl")], group_sizes=[3], stops=[0.3])
    alone, together = [r["cosine"] for r in rows[:2]], rows[2]["cosine"]
    assert alone == pytest.approx([1, 1], abs=1e-12)
    assert together < 0.9999


def test_large_groups_of_batch_scope_are_left_out():
    credit = outcome_credit_of("reinforce_pp")
    sizes = [2, LARGEST_OF_BATCH_SCOPE + 1]
    rows = exact_bias([credit], [SMALL], group_sizes=sizes, stops=[0.3])
    assert [row["group_size"] for row in rows] == [2]


def test_an_operator_that_reads_the_policy_without_saying_so_is_noticed():
    """turn_gae says so; this one gives its values another way."""
    assert turn_credit_of("turn_gae").reads_policy
    assert not turn_credit_of("progress").reads_policy
    quiet = Credit("quiet", lambda world: Result(world.log_prob_B_T, world.log_prob_B_T))
    with pytest.raises(ValueError, match="quiet: an advantage is not finite"):
        exact_bias([quiet], [SMALL], group_sizes=[2], stops=[0.3])


def test_a_question_without_a_choice_has_no_direction():
    only = Question("only", {"a": Place(0.2, 0.5)}, "a", 1)
    [row] = exact_bias([outcome_credit_of("maxrl", own="r")], [only], group_sizes=[2], stops=[0.3])
    for column in (
        "cosine",
        "norm_ratio",
        "scale",
        "difference",
        "cosine_own",
        "own_error",
        "beyond_r_and_gain",
    ):
        assert row[column] is None
