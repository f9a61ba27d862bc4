"""A list of grams: how it may be written, and what is refused."""

import pytest

from verl_credit.credit.planning.planning import STRATEGIC_GRAMS, parse_grams


@pytest.mark.parametrize(
    "given",
    [
        '["let me think", "that\'s it"]', " let me think , that's it",
        ["let me think", "that's it "], ("let me think", "that's it"),
    ],
)  # fmt: skip
def test_parse_grams(given):
    assert parse_grams(given) == ("let me think", "that's it")


def test_parse_grams_keeps_commas_of_json():
    assert parse_grams('["wait, let me"]') == ("wait, let me",)
    assert parse_grams(STRATEGIC_GRAMS) == STRATEGIC_GRAMS


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("", ValueError, "algorithm.strategic_grams='': entry 0 is ''"),
        ("let me think,", ValueError, "entry 1 is ''"),
        ("let me, ,think", ValueError, "entry 1 is ' '"),
        ('["let me", "..."]', ValueError, r"entry 1 is '\.\.\.'; expected a phrase of words"),
        ("[]", ValueError, r"algorithm.strategic_grams='\[\]' holds no gram"),
        ([], ValueError, r"algorithm.strategic_grams=\[\] holds no gram"),
        ('["let me"', ValueError, "algorithm.strategic_grams='.*' is not a JSON list"),
        ('["let me", 3]', TypeError, "entry 1 is 3; expected a string"),
        ([["let me"]], TypeError, r"entry 0 is \['let me'\]"),
        (7, TypeError, "algorithm.strategic_grams=7; expected a JSON list"),
        ("double check,Double-Check", ValueError, "entry 1, 'Double-Check', repeats 'double check'"),
        (["that's it", "thats it"], ValueError, "entry 1, 'thats it', repeats \"that's it\""),
    ],
)
def test_grams_that_are_refused(given, error, message):
    with pytest.raises(error, match=message):
        parse_grams(given)
