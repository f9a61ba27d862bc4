"""Anchors: which turns start from the same state."""

import json
from pathlib import Path

import numpy
import pytest
import torch

from verl_credit.credit import exact_anchors

FILE = Path(__file__).parents[1] / "golden" / "turn_methods.json"
CASES = {case["name"]: case for case in json.loads(FILE.read_text())["cases"] if case["method"] == "gigpo"}


def states_of(case):
    return [t["anchors"] for t in case["trajectories"]], [t["prompt"] for t in case["trajectories"]]


@pytest.mark.parametrize("name", ["several_prompts", "singleton_groups", "anchor_types"])
def test_exact_anchors_are_the_released_groups(name):
    states, prompts = states_of(CASES[name])
    ids = exact_anchors(states, prompts)
    visits = [(b, k) for b, turns in enumerate(states) for k in range(len(turns))]
    released = CASES[name]["expected"][0]["released"]["step_group"]
    for b, k in visits:
        for c, j in visits:
            assert (ids[b, k] == ids[c, j]) == (released[b][k] == released[c][j])


def test_type_and_shape_count():
    flat, square = numpy.array([1, 2, 3, 4]), numpy.array([[1, 2], [3, 4]])
    states = [[True, 1, 1.0, "1", [1], (1,), flat, square, flat.astype(float), torch.tensor([1, 2, 3, 4])]]
    assert exact_anchors(states, [0]).tolist() == [list(range(10))]
    again = [[1, [1], {"a": [1], "b": 2}, square], [1, [1], {"b": 2, "a": [1]}, square.copy()]]
    ids = exact_anchors(again, [0, 0])
    assert torch.equal(ids[0], ids[1]) and len(set(ids[0].tolist())) == 4


def test_prompts_share_nothing_and_absent_states_have_none():
    ids = exact_anchors([["x", None, "x"], ["x"]], torch.tensor([4, 9]), columns=4)
    assert ids.tolist() == [[0, -1, 0, -1], [1, -1, -1, -1]]
    assert exact_anchors([], []).shape == (0, 0)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (([["a"], ["b"]], [0]), "group_B has 1 entries; expected 2"),
        ((["ab"], [0]), "states row 0 is a str; expected a list with a state per turn"),
    ],
)
def test_what_is_refused(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        exact_anchors(*arguments)
    with pytest.raises(ValueError, match="columns=1: expected at least 2"):
        exact_anchors([["a", "b"]], [0], columns=1)


def test_a_state_that_cannot_be_hashed_is_refused_by_row_and_turn():
    with pytest.raises(TypeError, match="states row 1, turn 2 holds a set, .*hashed"):
        exact_anchors([["a"], ["a", "b", [{1, 2}]]], [0, 0])
    with pytest.raises(ValueError, match="states row 0, turn 1 holds NaN"):
        exact_anchors([["a", numpy.array([1.0, float("nan")])]], [0])
