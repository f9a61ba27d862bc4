"""Mathematics is answered in a box, and two ways of writing a number are the same answer."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.each import each
from verl_credit.turns.rollout.reward.qa import boxed_match, compute_score, final_answer, number

TRUTH = {"target": ["1234"], "form": "boxed"}


@each(
    "text, value",
    [
        ("\u22123", -3),
        ("+5", 5),
        ("007", 7),
        ("1{,}234", 1234),
        ("1\\,234", 1234),
        ("12,345,678.50", Fraction(24691357, 2)),
        ("72.", 72),
        (".5", Fraction(1, 2)),
        ("\\$18.50", Fraction(37, 2)),
        ("50\\%", 50),
        ("\\frac{3}{4}", Fraction(3, 4)),
        ("-\\dfrac{ 6 }{ 8 }", Fraction(-3, 4)),
    ],
)
def test_one_number(text, value):
    assert number(text) == value


@pytest.mark.parametrize("text", ["", "x", "7 2", "1,23,456", "1/0", "\\frac{1}{0}", "1e5", "--1", ".", "१२"])
def test_not_one_number(text):
    assert number(text) is None


def test_a_number_too_long_to_be_an_answer_is_not_read():
    """Python raises for integers of thousands of digits; a policy may write one."""
    assert number("9" * 5000) is None
    assert boxed_match("9" * 5000, ["72"]) == 0.0


@pytest.mark.slow
@given(st.integers(-(10**12), 10**12), st.integers(0, 999))
def test_every_way_of_writing_a_number_is_the_number(whole, thousandths):
    sign, size = ("-" if whole < 0 else ""), abs(whole)
    exact = Fraction(f"{sign}{size}.{thousandths:03d}")
    assert number(f"{sign}{size}.{thousandths:03d}") == exact
    assert number(f"{sign}{size:,}.{thousandths:03d}") == exact
    assert number(f"\\frac{{{exact.numerator}}}{{{exact.denominator}}}") == exact


@pytest.mark.parametrize(
    "answer, score",
    [
        ("\\boxed{1,234}", 1.0),
        ("\\boxed{1234.00}", 1.0),
        ("\\boxed{1234.01}", 0.0),
        ("\\boxed{12}", 0.0),
        ("\\boxed{}", 0.0),
        ("<answer>1234</answer>", 0.0),
        ("1234", 0.0),
    ],
)
def test_a_boxed_row_is_scored_by_its_box(answer, score):
    scored = compute_score("gsm8k", f"I think {answer}", TRUTH)
    assert (scored["score"], scored["em"], scored["f1"]) == (score, score, score)
    assert scored["format_ok"] == float("boxed" in answer)


def test_other_rows_are_not_answered_in_a_box():
    assert compute_score("nq", "\\boxed{1234}", {"target": ["1234"]})["em"] == 0.0
    assert compute_score("nq", "<answer>1234</answer>", {"target": ["1234"], "form": "tag"})["em"] == 1.0
    assert final_answer("\\boxed{7} <answer>8</answer>", TRUTH) == "7"


def test_gold_that_is_no_number_is_compared_as_written():
    assert boxed_match("x + 1", ["x+1"]) == 1.0
    assert boxed_match("x+2", ["x+1"]) == 0.0
    assert boxed_match("", [""]) == 0.0
    assert boxed_match(None, ["1"]) == 0.0


def test_an_unknown_form_is_refused():
    with pytest.raises(ValueError, match="form is 'latex': expected one of tag, boxed"):
        compute_score("gsm8k", "\\boxed{1}", {"target": ["1"], "form": "latex"})
