"""Which states of a step are tried again, and the values of states that are not."""

import pytest
import torch

from kit.byte_world import make_tokenizer
from kit.settings import settings
from kit.turn_rows import Row, lost_row, padding_row, turn_batch
from verl_credit.credit.turn.values import with_measured
from verl_credit.errors import IntegrityError
from verl_credit.turns.continuations import Continued, chosen_states, continues_at, states_of
from verl_credit.turns.values import TurnValues

NAN = float("nan")
ROWS = [
    Row(("ask", "page", "again", "other", "done")),
    Row(("ask", "page", "done")),
    Row(("ask", "page", "done"), golds=("Rome",)),
    Row(("look", "map", "done"), "Where?"),
    Row(("done",), "Where?"),
    lost_row("connect"),
    padding_row(Row(("ask", "page", "done"))),
]


def prompts_of(rows):
    return [row.prompt + "".join(row.golds) for row in rows]


def chosen(rows, name="0/1", log_prob_B_T=None, **keys):
    plan = {f"turn_continuations__{key}": value for key, value in keys.items()}
    given = settings(info_gain_norm_mode="turn_gae", turn_values="monte_carlo", **plan)
    turns = turn_batch(rows, make_tokenizer())
    return [*chosen_states(turns, prompts_of(rows), given, name, log_prob_B_T)]


def test_rows_share_a_state_that_has_one_prompt_and_the_same_tokens():
    turns = turn_batch(ROWS, make_tokenizer())
    places = states_of(turns, prompts_of(ROWS))
    assert [*places.values()] == [
        [(0, 1), (1, 1)],
        [(0, 2)],
        [(2, 1)],
        [(3, 1)],
    ]  # row 2 asks for something else
    assert set(chosen(ROWS, states=9)) == set(places)


def test_a_random_choice_follows_from_its_name_and_not_from_the_order_of_rows():
    first = chosen(ROWS, states=2)
    assert first == chosen(ROWS[::-1], states=2) and len(first) == 2
    assert len({tuple(chosen(ROWS, f"0/{step}", states=2)) for step in range(20)}) > 2


def test_the_turn_before_a_state_decides_how_uncertain_it_is():
    """The last turn of row 0, before which a state stands, is the least sure of all; it does not count."""
    turns = turn_batch(ROWS, make_tokenizer())
    mean = {(0, 0): -0.4, (0, 1): -0.2, (0, 2): -9.0, (1, 0): -0.4, (2, 0): -0.3, (3, 0): -0.1}
    log_prob_B_T = torch.zeros(turns.turn_ids_B_T.shape)
    for (row, turn), value in mean.items():
        log_prob_B_T[row][turns.turn_ids_B_T[row] == turn] = value
    of = {places[0]: state for state, places in states_of(turns, prompts_of(ROWS)).items()}
    found = chosen(ROWS, log_prob_B_T=log_prob_B_T, choose="uncertainty", states=3)
    assert found == [of[0, 1], of[2, 1], of[0, 2]]


def test_every_row_in_a_state_has_its_value():
    turns = turn_batch(ROWS, make_tokenizer())
    first, *_, last = states_of(turns, prompts_of(ROWS))
    made = Continued({first: [1.0, 0.0, 0.0], last: []}, tokens=8, seconds=2.0, left_out=3)
    measured = made.measured(turns, prompts_of(ROWS))
    known = measured.isfinite().nonzero().tolist()
    assert known == [[0, 1], [1, 1]] and measured[0, 1].item() == pytest.approx(1 / 3)
    counts = {"states": 1, "count": 3, "tokens": 8, "left_out": 3, "seconds": 2}
    assert made.metrics() == {f"credit/continuations/{name}": value for name, value in counts.items()}


def test_states_between_measured_ones():
    value = torch.tensor([[0.5, 0.6, 0.7, 0.8], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)
    measured = torch.tensor([[NAN, 0.25, NAN, 1.0], [NAN] * 4], dtype=torch.float64)
    held = [[0.5, 0.25, 0.25, 1.0], [0.1, 0.1, 0.1, 0.1]]
    assert with_measured(value[:, :1].expand(-1, 4), measured, hold=True).tolist() == held
    own = [[0.5, 0.25, 0.7, 1.0], [0.1, 0.2, 0.3, 0.4]]
    assert with_measured(value, measured, hold=False).tolist() == own


def test_steps_that_make_them():
    given = {"info_gain_norm_mode": "turn_gae", "turn_continuations__every": 3}
    on = settings(turn_values="monte_carlo", **given)
    assert [step for step in range(1, 9) if continues_at(on, step)] == [1, 4, 7]
    assert not continues_at(settings(turn_values="group", **given), 1)


def test_a_resume_with_another_value_of_the_other_states_is_refused():
    def values(otherwise):
        plan = {"turn_values": "monte_carlo", "turn_continuations__otherwise": otherwise}
        return TurnValues.of(settings(info_gain_norm_mode="turn_gae", **plan))

    saved = values("leave_one_out").state_dict()
    assert saved["steps"] == []
    values("leave_one_out").load_state_dict(saved)
    with pytest.raises(IntegrityError, match=r"observes \[\], and .* with \['leave_one_out'\]"):
        values("group").load_state_dict(saved)
