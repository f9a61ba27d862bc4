"""What is extracted from any text in time that grows with its length; F1 as HotpotQA's official script has it."""

import random
import re
import time

import pytest

from verl_credit.turns.reward.qa import compute_score, extract_answer, extract_boxed, token_f1


def took(function, text):
    """Best of seven, in seconds of this process."""
    times = []
    for _ in range(7):
        before = time.process_time()
        function(text)
        times.append(time.process_time() - before)
    return max(min(times), 1e-5)


@pytest.mark.parametrize(
    "function, part",
    [
        (extract_answer, "<answer>"),
        (extract_answer, "</answer>"),
        (extract_answer, "<answer>a</answer>"),
        (extract_boxed, "\\boxed{"),
        (extract_boxed, "\\boxed{1}"),
        (extract_boxed, "\\boxed{\\"),
        (extract_boxed, "{"),
    ],
)
def test_a_text_of_four_times_the_length_takes_about_four_times_as_long_not_sixteen(function, part):
    assert took(function, part * 8000) / took(function, part * 2000) < 10


def as_before(text):
    found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return found[-1].strip() if found else None


def boxed_by_box(text):
    """Every box by itself, the last first."""
    for box in reversed(list(re.finditer(r"\\boxed\s*\{", text))):
        depth, at = 1, box.end()
        while at < len(text):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            at += 2 if text[at] == "\\" else 1
            if not depth:
                return text[box.end() : at - 1].strip()
    return None


@pytest.mark.parametrize(
    "function, before, parts",
    [
        (extract_answer, as_before, ["<answer>", "</answer>", "<answer", ">", " a", "\n"]),
        (extract_boxed, boxed_by_box, ["\\boxed{", "\\boxed {", "{", "}", "\\", "\\}", "\\{", "x", " "]),
    ],
)
def test_what_is_extracted_is_what_every_place_by_itself_would_give(function, before, parts):
    draw = random.Random(0)
    for _ in range(5000):
        text = "".join(draw.choices(parts, k=draw.randrange(12)))
        assert function(text) == before(text), text


@pytest.mark.parametrize(
    "prediction, golds, f1",
    [  # hotpot_evaluate_v1.py: these three words are right as a whole or not at all
        ("yes", ["yes"], 1.0),
        ("Yes.", ["yes"], 1.0),
        ("yes", ["yes it is"], 0.0),
        ("yes it is", ["yes"], 0.0),
        ("no", ["no man s land"], 0.0),
        ("no man s land", ["no"], 0.0),
        ("noanswer here", ["noanswer"], 0.0),
        ("yes it is", ["no", "yes it was"], 2 / 3),
        ("the yes", ["yes"], 1.0),
    ],
)
def test_f1_of_yes_no_and_noanswer_is_all_or_nothing(prediction, golds, f1):
    assert token_f1(prediction, golds) == pytest.approx(f1)
    assert compute_score("x", f"<answer>{prediction}</answer>", {"target": golds})["f1"] == pytest.approx(f1)
