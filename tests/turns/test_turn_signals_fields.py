"""What agent loops, tools and reward functions of the user's report: wrong values are named by field, row and turn."""

import dataclasses
import sys

import numpy as np
import pytest

from kit.signal_step import rewards, step_of
from kit.turn_rows import Row
from verl_credit.errors import IntegrityError
from verl_credit.turns.rollout.book import RowRecord, known_reward, record_of
from verl_credit.turns.step.signals.built_in import find_signal
from verl_credit.turns.step.signals.own import own_signal

CREDIT = r"^row 3: extra_fields\['credit'\]: "
TOO_LONG = 10 ** (sys.get_int_max_str_digits() + 1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"n_searches": None}, "n_searches=None; expected a whole number"),
        ({"tool_fault": None}, "tool_fault=None; expected a text"),
        ({"signals": [1.0]}, r"signals=\[1.0\]; expected a mapping"),
        ({"searches": None}, "searches=None; expected a list"),
        ({"calls": {"turn": 0}}, "calls={'turn': 0}; expected a list"),
        ({"calls": [{"name": "x"}]}, r"calls\[0\]: turn=None; expected the number of the turn"),
        ({"calls": [{"turn": 0}, "x"]}, r"calls\[1\]='x'; expected a mapping"),
        ({"calls": [{"turn": "0"}]}, r"calls\[0\]: turn='0'; expected the number of the turn"),
        ({"calls": [{"turn": 0, "reward": "1"}]}, r"calls\[0\]: reward is '1'; expected a finite number"),
    ],
)
def test_a_field_of_another_kind_is_named(given, said):
    with pytest.raises(ValueError, match=CREDIT + said):
        record_of({"credit": given}, 3)


def test_what_a_call_says_is_kept_and_the_rest_has_its_default():
    calls = [{"turn": 1, "name": "find", "more": 2}, {"turn": 0, "arguments": "{}", "reward": 0.5}]
    found = record_of({"credit": {"calls": tuple(calls), "n_other_calls": True}}, 0)
    assert found["calls"] == [
        {"turn": 1, "name": "find", "arguments": "", "reward": None, "more": 2},
        {"turn": 0, "name": "", "arguments": "{}", "reward": 0.5},
    ]
    assert found["n_other_calls"] == 1 and found["stop_reason"] == RowRecord().stop_reason


@pytest.mark.parametrize(
    "value", [10**400, TOO_LONG, b"0.5", memoryview(b"0.5"), "1", float("-inf"), [1.0]], ids=range(7)
)
def test_a_reward_that_is_no_number_of_a_floats_range_is_named(value):
    assert [known_reward(one, "it") for one in (None, True, -0.5)] == [None, 1.0, -0.5]
    with pytest.raises(ValueError, match="^turn 2 is .*; expected a finite number, or None"):
        known_reward(value, "turn 2")
    signal = own_signal("mine.signal", lambda group: [[value]], {})
    with pytest.raises(
        IntegrityError, match="'mine.signal' gave .* for row 0, turn 0; expected a finite number"
    ):
        rewards({signal: 1.0}, step_of(Row(("ask", "page", "done"))))


def test_a_column_that_is_null_is_told_from_one_that_is_missing():
    steps = {find_signal("column:steps", {}): 1.0}
    said = "'column:steps': 'steps' of row 0 is null among the reward function's values; expected a list"
    with pytest.raises(IntegrityError, match=said):
        rewards(steps, step_of(Row(("ask", "page", "done"), scores={"em": 1.0, "steps": None})))
    rows = step_of(Row(("ask", "page", "done")))
    rows.turns.extra_infos[0]["steps"] = None
    with pytest.raises(IntegrityError, match="'steps' of row 0 is null in extra_info; expected a list"):
        rewards(steps, rows)
    rows.turns.scores[0] = {"steps": None}
    rows.turns.extra_infos[0]["steps"] = [0.5]
    assert rewards(steps, rows)[0].tolist() == [[0.5]]
    del rows.turns.scores[0]["steps"], rows.turns.extra_infos[0]["steps"]
    rows.turns.columns[0]["steps"] = None
    with pytest.raises(IntegrityError, match="'steps' of row 0 is null in the data file; expected a list"):
        rewards(steps, rows)


def test_the_reward_function_is_asked_first_then_extra_info_then_the_data_files_column():
    steps = {find_signal("column:steps", {}): 1.0}
    rows = step_of(Row(("ask", "page", "done"), scores={"steps": [0.1]}, columns={"steps": [0.3, 9.0]}))
    rows.turns.extra_infos[0]["steps"] = [0.2, 9.0]
    for place, expected in (
        (rows.turns.scores, 0.1),
        (rows.turns.extra_infos, 0.2),
        (rows.turns.columns, 0.3),
    ):
        assert rewards(steps, rows)[0].tolist() == [[expected]]
        del place[0]["steps"]
    with pytest.raises(IntegrityError, match="'steps' of row 0 is missing.*in the data file: none"):
        rewards(steps, rows)


def test_a_list_of_the_data_set_serves_rollouts_of_every_length_up_to_its_own():
    """The reward function's list is the rollout's own, and fits exactly."""
    steps, column = {find_signal("column:steps", {}): 1.0}, {"steps": [0.5, None, 0.25]}
    long = Row(("ask", "page", "again", "page", "done"), columns=column)
    rows = step_of(long, Row(("ask", "page", "done"), columns=column), Row(("done",), columns=column))
    reward, has, _ = rewards(steps, rows)
    assert reward.tolist() == [[0.5, 0.0], [0.5, 0.0], [0.0, 0.0]]
    assert has.tolist() == [[True, False], [True, False], [False, False]]
    as_array = dataclasses.replace(long, columns={"steps": np.array([0.5, 0.25, 1.0])})
    reward, has, _ = rewards(steps, step_of(as_array, Row(("done",))))  # without a tool turn nothing is read
    assert reward.tolist() == [[0.5, 0.25], [0.0, 0.0]] and has.tolist() == [[True, True], [False, False]]
    said = "'steps' of row 0 has 1 entries in the data file, and the row has 2 tool turns; a list of the data set"
    with pytest.raises(IntegrityError, match=said):
        rewards(steps, step_of(dataclasses.replace(long, columns={"steps": [0.5]})))
    for given in ([0.5], [0.5, 0.5, 0.5]):
        with pytest.raises(IntegrityError, match=f"gave {len(given)} values for row 0; .* 2 tool turns"):
            rewards(steps, step_of(dataclasses.replace(long, scores={"steps": given})))
    with pytest.raises(IntegrityError, match="gave str for row 0; expected a list"):
        rewards(steps, step_of(dataclasses.replace(long, columns={"steps": "0.5, 0.25"})))
