"""Gold answers in the forms of public files: read, left as they stand, or refused with what would be right."""

import json
import math
from decimal import Decimal

import numpy as np
import pytest

from kit.each import each
from verl_credit.turns.rollout.reward.golds import doubt, gold_answers
from verl_credit.turns.rollout.reward.literal import NotALiteral, literal
from verl_credit.turns.rollout.reward.qa import compute_score, stated_form

TWO = ["Ann Lee", "A. Lee"]
QUOTES = ["O'Neil", 'the "Fox"', "back\\slash", "é"]
TRIVIA = {
    "value": "Ace",
    "aliases": ["Ace", "Ace (band)"],
    "normalized_aliases": ["ace", "ace band"],
    "type": "WikipediaEntity",
}
ARRAY = "{'text': array(['Ann Lee', 'A. Lee'], dtype=object), 'answer_start': array([3, 9], dtype=int32)}"


@each(
    "held, golds",
    [
        # text
        ("['Ann Lee'\n 'A. Lee']", TWO),
        ("array(['Ann Lee', 'A. Lee'],\n      dtype='<U7')", TWO),
        ("{'Ann Lee', 'A. Lee'}", TWO),
        (str(QUOTES), QUOTES),
        (json.dumps(QUOTES), QUOTES),
        (json.dumps(json.dumps(TWO)), [json.dumps(json.dumps(TWO))]),  # a text in quotes: no list
        ("['Ann Lee']", ["Ann Lee"]),
        ("['42', 7.0, None, nan]", ["42", "7"]),
        (ARRAY, TWO),
        (str(TRIVIA), ["Ace", "Ace", "Ace (band)", "ace band"]),
        # lists and mappings
        (np.array(TWO, dtype=object), TWO),
        (np.array(["42", None], dtype=object), ["42"]),
        ({"target": {"target": TWO}}, TWO),
        (TRIVIA, ["Ace", "Ace", "Ace (band)", "ace band"]),
        ({"Value": "Ace", "Aliases": ["Ace (band)"], "NormalizedAliases": ["ace"]}, ["Ace", "Ace (band)"]),
        ({"answer": "Ann Lee", "aliases": ["A. Lee"]}, TWO),
        ({"target": None, "answers": TWO}, TWO),  # the other keys of a struct in parquet are null
        (["", None, " ", "x"], ["x"]),
        # numbers
        (42.5, ["42.5"]),
        (1e-7, ["0.0000001"]),
        (1e22, ["1" + "0" * 22]),
        (-0.0, ["0"]),
        (Decimal("42.50"), ["42.5"]),
        (np.float32(42.1), ["42.1"]),
        (np.array([1.0, 2.5], dtype=np.float32), ["1", "2.5"]),
        ({"target": [42.0, math.nan]}, ["42"]),
    ],
)
def test_what_can_mean_one_thing_only_is_decoded(held, golds):
    assert gold_answers(held) == gold_answers({"target": held}) == golds
    for gold in golds:
        assert compute_score("x", f"<answer>{gold}</answer>", held)["em"] == 1.0


@each(
    "gold",
    [
        "[sic]", "(1995)", "{}", "()", "A|B test", "[0, 1]", "[1995]", "(0, 1]", "{1, 2}", "('Heroes')", '"Heroes"',
        "Help!", "[Paris, London]", "[A", "f(x) = {x: 1}", '{"a": 1}', "array(", "array([1, 2])", "b", "B'nai B'rith",
        "42.0", "1e3", "[]x", "'Til Tuesday", "{'a'}", "x;y", "[[1, 2], [3, 4]]", "nan", "None", "True", "null",
    ],
)  # fmt: skip
def test_a_real_answer_that_looks_odd_stays_as_it_stands(gold):
    assert gold_answers(gold) == gold_answers({"target": [gold]}) == [gold]


@each(
    "held, why",
    [
        (True, "True is neither text nor a finite number"),
        (math.inf, "inf is neither text nor a finite number"),
        (b"Paris", "b'Paris' is neither text nor a finite number; write the answer as text"),
        ("b'Paris'", "is Python's text of bytes"),
        ([["Ann Lee", "A. Lee"], ["Bo"]], "lists several lists"),
        ("[['Ann Lee', 'A. Lee'], ['Bo']]", "lists several lists"),
        ({"label": "Paris"}, "has none of the keys target, value, text"),
        ({"answer": "Paris", "text": "London"}, "has several of the keys target, value, text"),
        ([{"short": "Paris"}], "has none of the keys"),
        ('[{"short": "Paris"}]', "has none of the keys"),
        ("['Ann Lee', 'A. Le", "begins as a list of answers does and cannot be read as one"),
        ("['a' 'b', 'c']", "a comma is missing"),
        ("['a''b']", "without a comma or a blank"),
        ('{"target": ["a', "cannot be read as one"),
        ("['a' ... 'b']", "cannot be read as one"),
        ("[b'Paris']", "cannot be read as one"),
        ("['a'] and more", "cannot be read as one"),
        (r"['\frac{1}{2}']", "an escape that gives a control character"),
        (r'["\ud800"]', "half of a character"),
        ("[" * 9 + "'a'" + "]" * 9, "nested more than"),
        ("[]", "at least one non-empty"),
        ("[null]", "at least one non-empty"),
        ({"text": [], "answer_start": []}, "at least one non-empty"),
        (math.nan, "at least one non-empty"),
        (np.bool_(True), "is neither"),
        (np.array(5), "is neither"),
    ],
)
def test_what_is_not_certain_is_refused_with_the_value_and_what_would_be_right(held, why):
    for truth in (held, {"target": held}):
        with pytest.raises(ValueError) as caught:
            gold_answers(truth)
        said = str(caught.value)
        assert said.startswith("reward_model.ground_truth is ") and "expected {'target': [gold, ...]}" in said
        assert why in said and len(said) < 900
    with pytest.raises(ValueError, match="reward_model.ground_truth"):
        compute_score("x", "<answer>Paris</answer>", held)


def test_the_form_of_a_row_is_read_from_text_too():
    assert stated_form(json.dumps({"target": ["4"], "form": "boxed"})) == "boxed"
    assert stated_form("['a']") is stated_form("Paris") is None


@each(
    "gold, number, what",
    [
        ("Paris|City of Light", False, "several answers joined by '|'"),
        ("Paris ||| City of Light", False, "several answers joined by '|||'"),
        ("Paris\nCity of Light", False, "several answers joined by '\\n'"),
        ("1|||2", True, "several answers joined by '|||'"),
        ("|x|; y", True, ""),
        ("[0, 1]", True, ""),
        ("[Paris, London]", False, "a list or an object in text"),
        ('{"a": 1}', False, "a list or an object in text"),
        ("42.0", False, "a number that was written as a float"),
        ("nan", False, "a missing value in text"),
        ("Nan", False, ""),
        ("('a', 'b", False, "a list or an object in text"),
        ("('cause I'm here", False, ""),
        ("{'a': 'b', ", False, "a list or an object in text"),
        ("('Heroes') by Bowie, 1977", False, ""),
        ("[sic]", False, ""),
        ("Paris, France", False, ""),
        ("|", False, ""),
    ],
)
def test_an_answer_that_looks_like_something_else_is_doubted_and_compared_as_it_stands(gold, number, what):
    assert doubt(gold, number=number) == what
    assert gold_answers(gold) == [gold]


def test_a_long_answer_is_doubted_in_time():
    for text in ("[" + "," * 200_000, "a" + " " * 200_000 + "b", "{" + ":'" * 100_000, "a\n" * 100_000):
        doubt(text)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, "['a'" * 20_000, "[" + "-" * 50_000 + "1]", "['" + "\\" * 50_001, "['a'" + " " * 100_000],
)
def test_text_of_any_length_and_depth_is_read_or_not_in_time(text):
    with pytest.raises(NotALiteral):
        literal(text)
