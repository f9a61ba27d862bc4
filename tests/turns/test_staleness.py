"""Ages of turns, and how far the ratio is off at each age, on a step that is worked out by hand."""

from types import SimpleNamespace

import pytest
import torch

from verl_credit.turns.rollout.book import RowRecord
from verl_credit.turns.step.staleness import staleness_metrics

STEP = 6  # trains version 5
TURN_IDS = torch.tensor([[0, 0, -1, 1], [0, -1, 1, -1], [0, 0, 0, 0]])
N_TURNS = torch.tensor([2, 2, 1])
VALID = torch.tensor([True, True, False])  # the last row was lost


def rows(given, valid):
    return SimpleNamespace(records=given, n_turns_B=N_TURNS, row_valid_B=valid, turn_ids_B_T=TURN_IDS)


def records(*versions):
    return [RowRecord(versions=list(of)).as_dict() for of in versions]


def measured(given, **more):
    return staleness_metrics(rows(given, VALID), step=STEP, **more)


def test_ages_are_counted_from_the_first_version_of_a_turn():
    found = measured(records([[3, 3], [3, 5]], [[5, 5], [5, 5]], [[0, 0]]))
    assert found == {
        "credit/staleness/turns_unknown": 0,
        "credit/staleness/mean": 1.0,  # 2, 2, 0, 0
        "credit/staleness/oldest": 2.0,
        "credit/staleness/turns_of_two_versions": 1,
        "credit/staleness/turn_0": 1.0,
        "credit/staleness/turn_1": 1.0,
    }


def test_the_ratio_is_averaged_over_the_tokens_of_an_age():
    now = torch.log(torch.tensor([[0.5, 0.4, 0.9, 0.2], [0.3, 0.9, 0.6, 0.9], [0.1, 0.1, 0.1, 0.1]]))
    written = torch.log(torch.tensor([[0.4, 0.5, 0.1, 0.1], [0.3, 0.1, 0.4, 0.1], [0.9, 0.9, 0.9, 0.9]]))
    found = measured(records([[4, 4], [5, 5]], [[5, 5], [5, 5]], [[0, 0]]), now_B_T=now, written_B_T=written)
    assert found["credit/staleness/tokens_at_age_1"] == 2
    assert found["credit/staleness/ratio_off_at_age_1"] == pytest.approx((0.25 + 0.2) / 2, rel=1e-6)
    assert found["credit/staleness/tokens_at_age_0"] == 3
    assert found["credit/staleness/ratio_off_at_age_0"] == pytest.approx((1.0 + 0.0 + 0.5) / 3, rel=1e-6)


def test_turns_that_nobody_dates_are_counted_and_left_out():
    found = measured(records([[None, None], [4, 5]], [], []))
    assert found["credit/staleness/turns_unknown"] == 3 and found["credit/staleness/mean"] == 1.0
    assert "credit/staleness/turn_0" not in found
    assert measured(records([], [], [])) == {"credit/staleness/turns_unknown": 4}
    assert measured(records([[None, 4], [4, None]], [], [])) == {"credit/staleness/turns_unknown": 4}


def test_a_turn_from_the_future_is_an_error():
    with pytest.raises(ValueError, match="row 1: weights of version 6 wrote turn 0; step 6 trains version 5"):
        measured(records([[5, 5], [5, 5]], [[5, 6], [5, 5]], []))


def test_no_row_counts():
    none = torch.zeros(3, dtype=torch.bool)
    found = staleness_metrics(rows(records([[5, 5]], [], []), none), step=STEP)
    assert found == {"credit/staleness/turns_unknown": 0}
