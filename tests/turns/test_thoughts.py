"""What is left of a text without its thoughts."""

import random
import time

import pytest

from kit.each import each
from verl_credit.turns.rollout.reward.qa import compute_score
from verl_credit.turns.rollout.thoughts import FORMS, opened_by, without_thoughts

A = "<answer>a</answer>"


@each(
    "text, rest",
    [
        ("no thought", "no thought"),
        ("<think>x</think>y", "y"),
        ("a<think>x</think>b<think>y</think>c", "abc"),
        ("a<think>x", "a"),  # cut
        ("<think>", ""),
        ("x</think>y", "y"),  # the prompt opened it
        ("<think>I write <think> first</think>y", "y"),
        ("<think>I end with </think> later</think>y", "y"),
        ("a<think>x</think>b</think>c", "ac"),
        ("<think>x[THINK]y</think>z", "z"),
        ("[THINK]x</think>y[/THINK]z", "z"),
        ("<think>x<|end|>y</think>z", "z"),
        ("a<|end|>", "a<|end|>"),  # other models end every turn so
        ("<thinking>x</thinking>y", "<thinking>x</thinking>y"),
    ],
)
def test_what_is_left_without_thoughts(text, rest):
    assert without_thoughts(text) == rest
    assert without_thoughts(rest) == rest


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_known(form):
    closed = f"{form}x{FORMS[form]}"
    assert without_thoughts(f"a{closed}b") == "ab"
    assert without_thoughts(f"a{form}x") == "a"
    assert without_thoughts(f"x{FORMS[form]}b", form) == "b" and without_thoughts("x", form) == ""
    for prompt, mark in (
        (f"<|im_start|>assistant\n{form}", form),
        (f"{form}\n", form),
        (f"I write {form} first.<|im_end|>\n", ""),
        (f"{closed}\n\n", ""),
        ("", ""),
    ):
        assert opened_by(prompt) == mark


@pytest.mark.slow
def test_the_time_is_linear():
    began = time.process_time()
    for part in ("<think>", "</think>", "<think>x</think>", "<", "[THINK]</think>"):
        without_thoughts(part * 100_000)
    assert time.process_time() - began < 5


def test_texts_without_marks_stay():
    draw = random.Random(0)
    for _ in range(200):
        text = "".join(draw.choices(["<", ">", "think", "/", "|", "a", "<answer>", "</answer>"], k=12))
        if not any(mark in text for pair in FORMS.items() for mark in pair):
            assert without_thoughts(text) == text


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_inside_a_thought_scores_only_where_thoughts_count(form):
    thought = f"{form}{A}{FORMS[form]}"
    for text, em, with_thoughts in (
        (thought, 0.0, 1.0),
        (thought + "<answer>b</answer>", 0.0, 0.0),
        ("<answer>b</answer>" + thought, 0.0, 1.0),
        (form + A, 0.0, 1.0),
        (f"{form}<answer>b</answer>{FORMS[form]}{A}", 1.0, 1.0),
    ):
        record = {"credit": {"final_text": text, "tool_fault": ""}}
        for score in (
            lambda text=text, **kwargs: compute_score("x", text, "a", **kwargs),
            lambda record=record, **kwargs: compute_score("x", "", "a", record, **kwargs),
        ):
            assert score()["em"] == em and score(include_reasoning=True)["em"] == with_thoughts, text
    assert compute_score("x", thought, "a")["format_ok"] == 0.0
    boxed = {"target": ["4"], "form": "boxed"}
    assert compute_score("x", rf"{form}\boxed{{4}}{FORMS[form]}\boxed{{5}}", boxed)["em"] == 0.0
