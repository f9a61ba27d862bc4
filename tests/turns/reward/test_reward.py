"""Exact match as the field computes it, and its edges."""

from datetime import date

import pytest

from kit.each import each
from verl_credit.turns.rollout.reward.golds import gold_answers
from verl_credit.turns.rollout.reward.qa import compute_score, exact_match, extract_answer, token_f1


@each(
    "prediction, golds, em",
    [
        ("The Eiffel Tower!", ["eiffel tower"], 1.0),
        ("a  dog", ["Dog"], 1.0),
        ("cat", ["dog", "cat"], 1.0),
        ("cats", ["cat"], 0.0),
        (None, ["cat"], 0.0),
        ("", ["cat"], 0.0),
        ("", ["The"], 0.0),
        ("the", ["The"], 1.0),
        ("!", ["The"], 0.0),
        ("A.", ["A"], 1.0),
        ("an", ["A"], 0.0),
        ("The The", ["the the"], 1.0),
        ("The", ["The The"], 0.0),
        ("{}", ["{}"], 1.0),
        ("[]", ["{}"], 0.0),
        ("", ["{}"], 0.0),
    ],
)
def test_exact_match(prediction, golds, em):
    assert exact_match(prediction, golds) == em


@pytest.mark.parametrize("gold", ["A", "The The", "a an the", "{}", "!", "Ann Lee", "yes", "(1995)", "A|B"])
def test_exact_match_and_f1_agree_on_a_right_answer(gold):
    score = compute_score("x", f"<answer> {gold.upper()} </answer>", {"target": ["other", gold]})
    assert (score["em"], score["f1"]) == (1.0, 1.0)


def test_f1_of_a_gold_answer_that_normalisation_empties_counts_its_articles():
    assert token_f1("the", ["The The"]) == pytest.approx(2 / 3)
    assert token_f1("!", ["{}"]) == token_f1("", ["A"]) == 0.0


def test_f1_counts_repeated_words_once_each():
    assert token_f1("new york york", ["new york"]) == pytest.approx(2 * (2 / 3) * 1 / (2 / 3 + 1))
    assert token_f1("x", ["new york"]) == 0.0


@pytest.mark.parametrize(
    "text, answer",
    [
        ("<answer>a</answer> <answer> b </answer><answer>c", "b"),
        ("I write it between <answer> and </answer>. <answer>Paris</answer>", "Paris"),
        ("which word? <answer>and</answer>", "and"),
        ("<answer>Paris<answer>", None),
    ],
)
def test_the_answer_is_the_one_that_a_reader_takes(text, answer):
    assert extract_answer(text) == answer
    if answer:
        assert compute_score("x", text, answer)["em"] == 1.0


def test_an_answer_inside_an_observation_does_not_count():
    page = "<tool_response><answer>gold</answer></tool_response> I give up"
    extra = {"credit": {"final_text": "I give up", "tool_fault": ""}}
    assert compute_score("x", page, {"target": ["gold"]}, extra)["em"] == 0.0
    assert compute_score("x", page, {"target": ["gold"]})["em"] == 1.0  # without a record: the whole text


def test_format_penalty_is_a_component_of_its_own():
    score = compute_score("x", "no tag", {"target": ["gold"]}, format_penalty=0.5)
    assert (score["score"], score["em"], score["format_penalty"]) == (-0.5, 0.0, 0.5)


def test_a_mistyped_reward_keyword_is_refused():
    with pytest.raises(TypeError, match="format_penalti"):
        compute_score("x", "no tag", {"target": ["gold"]}, format_penalti=0.5)


@pytest.mark.parametrize(
    "bad", [None, {}, {"target": []}, {"target": None}, {"target": [" "]}, "", [], date(2026, 1, 1)]
)
def test_a_question_without_gold_is_refused(bad):
    with pytest.raises(ValueError, match="at least one"):
        gold_answers(bad)
