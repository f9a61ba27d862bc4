"""What is extracted from any text in time that grows with its length; F1 as HotpotQA's official script has it."""

import random
import re
import time

import pytest

from verl_credit.turns.rollout.reward.qa import compute_score, extract_answer, extract_boxed, token_f1


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


MENTIONS = ("", "and", "...", "…")


def last_of(found):
    """The last that is more than a mention; the last where there is no other."""
    answers = [one for one in found if one not in MENTIONS]
    return answers[-1] if answers else found[-1] if found else None


def tag_by_tag(text):
    """Every opening tag whose next tag is a closing one."""
    found = []
    for opened in re.finditer("<answer>", text):
        rest = text[opened.end() :]
        tag = re.search("</?answer>", rest)
        if tag and tag[0] == "</answer>":
            found.append(rest[: tag.start()].strip())
    return last_of(found)


def box_by_box(text):
    """Every box by itself."""
    found = []
    for box in re.finditer(r"\\boxed\s*\{", text):
        depth, at = 1, box.end()
        while at < len(text):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            at += 2 if text[at] == "\\" else 1
            if not depth:
                found.append(text[box.end() : at - 1].strip())
                break
    return last_of(found)


@pytest.mark.parametrize(
    "function, one_by_one, parts",
    [
        (extract_answer, tag_by_tag, ["<answer>", "</answer>", "<answer", ">", " a", "and", "...", "\n"]),
        (extract_boxed, box_by_box, ["\\boxed{", "\\boxed {", "{", "}", "\\", "\\}", "\\{", "x", " "]),
    ],
)
def test_what_is_extracted_is_what_every_place_by_itself_would_give(function, one_by_one, parts):
    draw = random.Random(0)
    for _ in range(5000):
        text = "".join(draw.choices(parts, k=draw.randrange(12)))
        assert function(text) == one_by_one(text), text


@pytest.mark.parametrize(
    "prediction, golds, f1",
    [  # hotpot_evaluate_v1.py: these three words are right as a whole or not at all
        ("yes", ["yes"], 1.0),
        ("Yes.", ["yes"], 1.0),
        ("yes", ["yes it is"], 0.0),
        ("no man s land", ["no"], 0.0),
        ("yes it is", ["no", "yes it was"], 2 / 3),
        ("the yes", ["yes"], 1.0),
    ],
)
def test_f1_of_yes_no_and_noanswer_is_all_or_nothing(prediction, golds, f1):
    assert token_f1(prediction, golds) == pytest.approx(f1)
    assert compute_score("x", f"<answer>{prediction}</answer>", {"target": golds})["f1"] == pytest.approx(f1)
