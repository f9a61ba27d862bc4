"""The state before each turn, as gigpo and hgpo compare it."""

import pytest
import torch

from kit.byte_world import make_tokenizer
from kit.settings import settings
from kit.turn_rows import Row, lost_row, padding_row, turn_batch
from verl_credit.errors import IntegrityError
from verl_credit.turns.step.anchor_table import anchor_table
from verl_credit.turns.step.signals.signal import StepRows

ROWS = [
    Row(("ask", "page", "again", "page two", "done")),
    Row(("seek", "page", "done")),
    Row(("ask", "page!", "other", "page two", "done")),
    Row(("ask", "page", "done")),
]
BATCH = [*ROWS, lost_row("connect"), padding_row(ROWS[0])]
GROUPS = [0, 0, 0, 1, 0, 2]
HERE = __name__


@pytest.fixture(scope="module")
def rows():
    tokenizer = make_tokenizer()
    turns = turn_batch(BATCH, tokenizer)
    nothing = torch.zeros(len(BATCH), 2)
    return StepRows(
        turns, tokenizer.decode, torch.zeros(len(BATCH)), torch.tensor(GROUPS), nothing, nothing.bool()
    )


def anchors(rows, **changes):
    """Per row, the ids renumbered in order of appearance over all rows; None for no state."""
    table = anchor_table(settings(info_gain_norm_mode="gigpo", **changes), rows)
    number: dict[int, int] = {}
    return [[None if i < 0 else number.setdefault(i, len(number)) for i in row] for row in table.tolist()]


def test_what_was_shown_last_is_the_state_and_every_rollout_of_a_question_starts_from_one(rows):
    assert anchors(rows) == [
        [0, 1, 2],
        [0, 1, None],
        [0, 3, 2],
        [4, 5, None],  # another question
        [None] * 3,  # lost
        [None] * 3,  # padding
    ]


def test_only_turns_have_a_state():
    """Not what is found by a search that ends a row, nor the prompt of a row of which nothing is the policy's."""
    tokenizer = make_tokenizer()
    turns = turn_batch([Row(("ask", "page")), Row(("ask", "page", "done")), Row(())], tokenizer)
    nothing = torch.zeros(3, 1)
    found = anchors(
        StepRows(
            turns, tokenizer.decode, torch.zeros(3), torch.zeros(3, dtype=torch.long), nothing, nothing.bool()
        )
    )
    assert found == [[0, None], [0, 1], [None, None]]


def test_the_prefix_is_every_token_before_the_turn(rows):
    assert anchors(rows, turn_anchor="prefix")[:4] == [[0, 1, 2], [0, 3, None], [0, 4, 5], [6, 7, None]]


def test_the_prefix_begins_with_the_prompt():
    """An environment's first observation may stand in the prompt of each row: equal responses are in other states then."""
    tokenizer = make_tokenizer()
    turns = turn_batch([Row(("ask", "page", "done"), f"q, summary {name}") for name in "ABA"], tokenizer)
    nothing = torch.zeros(3, 1)
    rows = StepRows(
        turns, tokenizer.decode, torch.zeros(3), torch.zeros(3, dtype=torch.long), nothing, nothing.bool()
    )
    assert anchors(rows, turn_anchor="prefix") == [[0, 1], [2, 3], [0, 1]]


def named(*states_of_rows):
    """Two rollouts of two turns each, with the observation ``page``, and the states that their records name."""
    tokenizer = make_tokenizer()
    turns = turn_batch([Row(("ask", "page", "done")) for _ in states_of_rows], tokenizer)
    for record, states in zip(turns.records, states_of_rows, strict=True):
        record["states"] = states
    nothing, rows = torch.zeros(len(states_of_rows), 1), len(states_of_rows)
    groups = torch.zeros(rows, dtype=torch.long)
    return StepRows(turns, tokenizer.decode, torch.zeros(rows), groups, nothing, nothing.bool())


def test_a_state_that_the_record_names_is_the_state():
    rows = named(["a", "b"], ["b", "a"], ["a", None])
    assert anchors(rows) == anchors(rows, turn_anchor="state") == [[0, 1], [1, 0], [0, None]]
    assert anchors(rows, turn_anchor="observation") == [[0, 1], [0, 1], [0, 1]]


def test_records_without_names_have_observations_and_are_refused_where_names_are_asked_for():
    rows = named([], [])
    assert anchors(rows) == [[0, 1], [0, 1]]
    with pytest.raises(IntegrityError, match=r"turn_anchor=state, row 0: .*observation"):
        anchors(rows, turn_anchor="state")
    with pytest.raises(IntegrityError, match=r"2 turns"):
        anchors(named(["a"], ["a"]), turn_anchor="state")


def length_so_far(trajectory):
    return [number for number, _ in enumerate(trajectory.turns)]


def too_few(trajectory):
    return trajectory.tool_turns


def unhashable(trajectory):
    return [object.__new__(Unhashable) for _ in trajectory.turns]


def breaks(trajectory):
    return trajectory.turns[9]


def not_a_number(trajectory):
    return [float("nan") for _ in trajectory.turns]


class Unhashable:
    __hash__ = None


def test_a_state_of_ones_own(rows):
    assert anchors(rows, turn_anchor=f"{HERE}.length_so_far")[:3] == [[0, 1, 2], [0, 1, None], [0, 1, 2]]


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "too_few",
            r"too_few returned 2 values for row 0; expected a list with a state for each of its 3 turns",
        ),
        ("not_a_number", r"turn_anchor=.*not_a_number: states row 0, turn 0 holds NaN"),
        ("breaks", r"turn_anchor=.*breaks raised for row 0: IndexError"),
        ("unhashable", "row 0, turn 0 holds a Unhashable, which cannot be hashed"),
    ],
)
def test_what_is_no_state_is_named_by_row(rows, name, message):
    with pytest.raises(IntegrityError, match=message):
        anchors(rows, turn_anchor=f"{HERE}.{name}")
