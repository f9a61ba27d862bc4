"""What a step has to be: a wrong field is refused with its value, and what is sent is plain."""

import json
from dataclasses import asdict

import numpy as np
import pytest

from verl_credit.worlds.environments.interface import BadAnswer, Step, checked


@pytest.mark.parametrize(
    "field, value",
    [
        ("reward", float("nan")), ("reward", float("inf")), ("reward", "1.0"), ("reward", [1.0]),
        ("progress", 1.5), ("progress", -0.1), ("progress", "done"),
        ("observation", 7), ("observation", None), ("state", 7), ("actions", "left"), ("actions", [1]),
        ("actions", None), ("actions", 2),
        ("terminated", 1), ("truncated", None), ("valid", "yes"), ("success", 1),
    ],
)  # fmt: skip
def test_a_wrong_field_is_refused_with_its_value(field, value):
    with pytest.raises(BadAnswer) as caught:
        checked(Step(**{"observation": "x", field: value}), 100)
    assert field in str(caught.value) and repr(value) in str(caught.value)


@pytest.mark.parametrize("answer", [None, "text", ("text", 1.0, True, False, {})])
def test_an_answer_that_is_no_step_is_refused(answer):
    with pytest.raises(BadAnswer, match=type(answer).__name__):
        checked(answer, 100)


def test_numpys_values_become_plain_ones():
    step = Step("x", np.float32(0.5), np.True_, np.False_, np.bool_(True), progress=np.float64(1))
    sent = json.loads(json.dumps(asdict(checked(step, 100))))
    assert sent["reward"] == 0.5 and sent["terminated"] is sent["success"] is True and sent["progress"] == 1


def test_the_middle_of_a_long_observation_is_left_out_and_counted():
    step = checked(Step("a" * 50 + "b" * 999_900 + "c" * 51), 101)
    first, note, last = step.observation.split("\n")
    assert (first, last, step.cut) == ("a" * 50, "c" * 51, True) and "999900" in note
    assert checked(Step("a" * 101), 101) == Step("a" * 101, actions=[])


def test_lone_surrogates_and_long_names_of_states():
    step = checked(Step("a\ud800", actions=["\ud800"], state="s" * 5000), 100)
    assert (step.observation, step.actions, len(step.state)) == ("a?", ["?"], 32)
    assert step.state != checked(Step("", state="s" * 5001), 100).state
    assert checked(Step("", state="s" * 200), 100).state == "s" * 200
