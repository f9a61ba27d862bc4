"""Anchors: which turns start from the same state, by what they are and by how alike their texts are."""

import difflib
import json
from pathlib import Path

import numpy
import pytest
import torch

from verl_credit.credit import exact_anchors, similar_anchors

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


SIMILAR = [expected for expected in CASES["similarity"]["expected"] if expected["enable_similarity"]]


@pytest.mark.parametrize("expected", SIMILAR, ids=lambda expected: str(expected["similarity_thresh"]))
def test_similar_anchors_are_the_released_clusters_in_the_released_order(expected):
    states, prompts = states_of(CASES["similarity"])
    order = [(b, k) for b, turns in enumerate(states) for k in range(len(turns))]
    ids = similar_anchors(states, prompts, threshold=expected["similarity_thresh"], released_order=order)
    released = expected["released"]["step_group"]
    for b, k in order:
        for c, j in order:
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
    ids = similar_anchors([["x", None, "x"], ["x"]], ["p", "q"], threshold=0.5)
    assert ids.tolist() == [[0, -1, 0], [1, -1, -1]]
    assert exact_anchors([], []).shape == (0, 0)


@pytest.mark.parametrize("build", [exact_anchors, similar_anchors])
@pytest.mark.parametrize(
    "arguments, message",
    [
        (([["a"], ["b"]], [0]), "group_B has 1 entries; expected 2"),
        ((["ab"], [0]), "states row 0 is a str; expected a list with a state per turn"),
    ],
)
def test_what_both_refuse(build, arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        build(*arguments)
    with pytest.raises(ValueError, match="columns=1: expected at least 2"):
        build([["a", "b"]], [0], columns=1)


def test_a_state_that_cannot_be_hashed_is_refused_by_row_and_turn():
    with pytest.raises(TypeError, match="states row 1, turn 2 holds a set, .*hashed"):
        exact_anchors([["a"], ["a", "b", [{1, 2}]]], [0, 0])
    with pytest.raises(ValueError, match="states row 0, turn 1 holds NaN"):
        exact_anchors([["a", numpy.array([1.0, float("nan")])]], [0])
    with pytest.raises(TypeError, match="states row 1, turn 0 holds a int; .*texts"):
        similar_anchors([["a"], [3]], [0, 0])


@pytest.mark.parametrize("threshold", [0, 1, 1.5, float("nan"), True, "0.9"])
def test_a_threshold_outside_0_to_1_is_refused(threshold):
    with pytest.raises(ValueError, match="expected a number above 0 and below 1"):
        similar_anchors([["a"]], [0], threshold=threshold)


def test_the_order_of_the_batch_does_not_matter_where_rows_have_a_key():
    """b is half like a and half like c, which have nothing in common: who comes first decides."""
    states = [["abcd"], ["abef"], ["ghef"]]
    assert similar_anchors(states, [0] * 3, threshold=0.5).tolist() == [[0], [0], [1]]
    for order in ([1, 0, 2], [2, 1, 0], [1, 2, 0]):
        moved, back = [states[i] for i in order], [order.index(i) for i in range(3)]
        keyed = similar_anchors(moved, [0] * 3, threshold=0.5, row_key_B=order)
        assert keyed[back].tolist() == [[0], [0], [1]]
    assert similar_anchors(moved, [0] * 3, threshold=0.5).tolist() == [[0], [0], [0]]
    with pytest.raises(ValueError, match="row_key_B has 1 entries; expected 3"):
        similar_anchors(states, [0] * 3, row_key_B=[0])


def test_long_texts_are_compared_whole_and_released_ones_without_frequent_characters():
    """Ratios of a text of 266 characters to one of 255: .28, and .02 with autojunk."""
    states, _ = states_of(CASES["similarity_over_200_characters"])
    pair = [[states[0][0]], [states[0][2]]]
    assert similar_anchors(pair, [0, 0], threshold=0.2).tolist() == [[0], [0]]
    released = similar_anchors(pair, [0, 0], threshold=0.2, released_order=[(0, 0), (1, 0)])
    assert released.tolist() == [[0], [1]]
    for order in ([(0, 0)], [(0, 0), (1, 1)], [(0, 0), (1, 0), (1, 0)]):
        with pytest.raises(ValueError, match="released_order: expected every .row, turn. of states once"):
            similar_anchors(pair, [0, 0], released_order=order)


@pytest.mark.parametrize("threshold", [0.6, 0.7, 0.8])
def test_clusters_are_first_fit_by_the_first_member(threshold):
    """An independent loop over the same texts."""
    words = ["room", "cup", "key", "lamp"]
    generator = torch.Generator().manual_seed(3)
    states = [
        [" ".join(words[i] for i in torch.randint(0, 4, (6,), generator=generator)) for _ in range(4)]
        for _ in range(8)
    ]
    ids = similar_anchors(states, [0] * 8, threshold=threshold).flatten().tolist()
    firsts, expected = [], []
    for text in [text for turns in states for text in turns]:
        ratios = [difflib.SequenceMatcher(None, text, first, autojunk=False).ratio() for first in firsts]
        found = next((i for i, ratio in enumerate(ratios) if ratio >= threshold), len(firsts))
        firsts += [text] if found == len(firsts) else []
        expected.append(found)
    assert ids == expected and 1 < len(firsts) < 32
