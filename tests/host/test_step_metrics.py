"""Metrics of one step on a batch small enough to count by hand."""

import dataclasses

import pytest
import torch

from kit.byte_world import make_tokenizer
from kit.modes import NO_TABLES
from kit.settings import settings
from kit.turn_rows import Row, credited, lost_row, padding_row, turn_batch
from verl_credit.credit import MODES, TurnCredit
from verl_credit.credit.turn.turn_credit import BatchTables
from verl_credit.names import ROWS_LEFT_OUT, TURNS_CUT
from verl_credit.records.run.events import left_out_note, small_groups_note
from verl_credit.turns.rollout.book import IN_ENVIRONMENT, NO_TOKEN, STOP_REASONS, RowRecord
from verl_credit.turns.rollout.search.faults import FAULT_CODES
from verl_credit.turns.step.assign import CreditRun, StepCredit, StepInputs
from verl_credit.turns.step.step_metrics import COUNTED, credit_metrics, gain_metrics, row_metrics

GARBAGE = 1e9  # stands where nothing may be read
GROUP_SIZE = 2


def row(searches, em, stop_reason="answer", **record):
    parts = ["call", "page"] * searches + ["answer"]
    scores = {"em": em, "f1": (1 + em) / 2, "format_ok": float(stop_reason == "answer"), "unknown": 5.0}
    return Row(tuple(parts), scores=scores, record=RowRecord(stop_reason, n_searches=searches, **record))


BATCH = [
    row(2, 1.0),  # group 0: all solved
    row(1, 1.0),
    row(1, 0.0, "no_answer"),  # group 1: all failed
    row(0, 0.0, "bad_call", bad_calls=3),
    row(1, 1.0),  # group 2: one of each
    row(1, 0.0, bad_calls=1, n_retries=2),
    row(2, 1.0, "max_turns"),  # group 3: short, its other row is lost
    dataclasses.replace(
        lost_row("connect"),
        parts=("call", "page", "answer"),  # what counts is that the row is not valid
        scores={"em": GARBAGE, "f1": GARBAGE, "format_ok": GARBAGE},
    ),
]
GROUPS = [0, 0, 1, 1, 2, 2, 3, 3]
OUTCOMES = [1.0, 1.0, -0.2, -0.2, 1.0, 0.0, 1.0, 0.0]  # a penalty for missing answers is in the outcome
GAINS = [[0.5, -0.25], [0.25], [-0.5], [], [0.25], [0.0], [None, 0.5], [GARBAGE]]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def turns(tokenizer):
    return turn_batch(BATCH, tokenizer)


def by_hand(turns):
    """The worked batch after the estimator, with credit that is easy to average and garbage elsewhere."""
    no = GARBAGE
    gain = [[0.5, -0.25], [0.25, no], [-0.5, no], [no, no], [0.25, no], [0.0, no], [no, 0.5], [no, no]]
    mask = [[1, 1], [1, 0], [1, 0], [0, 0], [1, 0], [1, 0], [0, 1], [1, 1]]
    advantage = [[1.0, 2.0], [3.0, no], [-2.0, no], [no, no], [-1.0, no], [2.0, no], [3.0, -4.0], [no, no]]
    scale = [[1.5, 0.5], [1.5, no], [0.5, no], [no, no], [1.5, no], [0.5, no], [no, 1.0], [no, no]]
    credit = TurnCredit(
        torch.tensor(advantage),
        torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0, -1.0, 5.0, no]),
        torch.tensor(scale),
        dict.fromkeys(COUNTED[:6], 0) | {"turn_groups_of_one": 3},
    )
    shape, none = turns.turn_ids_B_T.shape, torch.zeros(2, 0)
    return StepCredit(
        StepInputs(CreditRun(settings(), None), turns, none, none.bool()),
        BatchTables(
            torch.tensor(OUTCOMES),
            torch.tensor(gain),
            torch.tensor(mask).bool(),
            torch.tensor(GROUPS),
            turns.row_valid_B,
            turns.n_turns_B - 1,
        ),
        credit,
        torch.zeros(shape),
        torch.ones(shape),
        {},
    )


def test_what_the_agent_loops_reported(turns):
    got = row_metrics(turns)
    assert not {f"credit/stop/{reason}" for reason in IN_ENVIRONMENT} & {*got}
    assert {
        reason: got[f"credit/stop/{reason}"] * 8 for reason in STOP_REASONS if reason not in IN_ENVIRONMENT
    } == {
        "answer": 4,
        "no_answer": 1,
        "turn_length": 0,
        "bad_call": 1,
        "length": 0,
        "max_turns": 1,
        "tool_fault": 1,
    }
    assert got["credit/tool/fault_connect"] == got["credit/tool/fault_rows"] == 1
    assert got["credit/tool/bad_calls"] == 4
    assert got["credit/tool/retries"] == 2
    assert got["credit/tool/searches_per_row"] == 1.0  # 8 of 8 rows, the lost one included
    assert got["credit/rows_trained"] == 7


def test_rollouts_in_an_environment_have_metrics_of_their_own(tokenizer):
    ends = (
        {"success": 1.0, "return": 0.5, "steps": 4.0, "cut": 1},
        {"success": 0.0, "return": -0.5, "steps": 6.0, "cut": 0},
    )
    rows = [row(1, 1.0), row(1, 0.0), lost_row("env_lost")]
    turns = turn_batch(rows, tokenizer)
    for record, end in zip(turns.records, (*ends, {"success": 0.0, "return": 9.0}), strict=True):
        record["environment"] = end
    turns.records[0]["stop_reason"] = "done"
    got = row_metrics(turns)
    found = {name: got[f"credit/env/{name}"] for name in ("success", "return", "steps", "cut")}
    assert found == {"success": 0.5, "return": 0.0, "steps": 5.0, "cut": 0.5}
    assert (got["credit/stop/done"], got["credit/stop/truncated"]) == (1 / 3, 0)
    assert got["credit/tool/fault_env_lost"] == 1 and got["credit/tool/fault_env_raised"] == 0


def test_searches_that_found_nothing_are_counted(turns):
    turns.records[0]["searches"] = [{"pages": []}, {"pages": ["7"]}, {"pages": []}]
    assert row_metrics(turns)["credit/tool/empty_searches"] == 2


def test_turns_that_were_cut_are_counted_among_all_turns(tokenizer):
    """A lost row has no turns; a padding row is nobody's."""
    cut = [row(2, 0.0, "turn_length"), row(0, 0.0, "turn_length")]
    turns = turn_batch([*cut, row(1, 1.0), lost_row("connect"), padding_row(cut[0])], tokenizer)
    got = row_metrics(turns)
    assert got["credit/stop/turn_length"] == 2 / 4
    assert got[TURNS_CUT] == 2 / (3 + 1 + 2)


def of_groups(groups, one, two):
    return {"credit/turn_groups": groups, "credit/turn_groups_of_one": one, "credit/turn_groups_of_two": two}


def test_small_groups_are_warned_of_where_turns_are_compared_and_they_are_many():
    assert small_groups_note(MODES["turn-group-v1d"], of_groups(20, 3, 2), 3, 16) is None
    assert small_groups_note(MODES["turn-group-v1d"], of_groups(0, 0, 0), 3, 16) is None
    said = small_groups_note(MODES["turn-group-v1d"], of_groups(20, 4, 2), 3, 16)
    for words in (
        "in step 3 30% of the groups",
        "one member (4)",
        "two (2)",
        "rollout.n (now 16)",
        "search.max_searches",
    ):
        assert words in said
    for mode in MODES.values():
        assert (small_groups_note(mode, of_groups(20, 9, 9), 3, 16) is not None) == mode.per_turn


def test_rows_that_are_left_out_are_a_share_of_those_that_count_and_many_are_warned_of(tokenizer):
    """Row 0 of seven that count lacks a gain that row 1 has; row 6 lacks one that its prompt has in no row."""
    turns, gains = turn_batch(BATCH, tokenizer), [[None, -0.25], *GAINS[1:]]
    for mode in MODES.values():
        if not mode.needs:
            step = credited(turns, gains, OUTCOMES, GROUPS, info_gain_norm_mode=mode.name)
            share = credit_metrics(step, GROUP_SIZE).get(ROWS_LEFT_OUT)
            assert share == (pytest.approx(1 / 7) if mode.whole_returns else None), mode.name
    assert left_out_note(0.25, 3, "gigpo") is None
    said = left_out_note(0.3, 3, "gigpo")
    for words in ("step 3 30% of the rows", "info_gain_norm_mode=gigpo compares whole returns", "Give 0"):
        assert words in said


def test_scores_are_means_over_the_rows_that_count(turns):
    """The lost row's scores are no grade of the policy; a score nobody reported has no metric."""
    got = row_metrics(turns)
    assert got["credit/outcome/em"] == pytest.approx(4 / 7)
    assert got["credit/outcome/f1"] == pytest.approx((4 + 3 / 2) / 7)
    assert got["credit/outcome/format_ok"] == pytest.approx(4 / 7)
    assert {name for name in got if name.startswith("credit/outcome/")} == {
        "credit/outcome/em",
        "credit/outcome/f1",
        "credit/outcome/format_ok",
    }


def test_faults_are_counted_by_code(tokenizer):
    rows = [*map(lost_row, ("connect", "deadline", "deadline", NO_TOKEN)), row(0, 1.0)]
    got = row_metrics(turn_batch(rows, tokenizer))
    faults = {name: value for name, value in got.items() if "fault_" in name}
    counted = {"connect": 1, "deadline": 2, NO_TOKEN: 1, "rows": 4}
    assert faults == {
        f"credit/tool/fault_{name}": counted.get(name, 0) for name in [*FAULT_CODES, NO_TOKEN, "rows"]
    }


def test_gains_over_the_turns_that_have_one(turns):
    got = gain_metrics(by_hand(turns))  # .5, -.25, .25, -.5, .25, 0, .5
    assert got == {
        "credit/gain/turns": 7,
        "credit/gain/mean": pytest.approx(0.75 / 7),
        "credit/gain/std": pytest.approx((15 / 16 / 7 - (0.75 / 7) ** 2) ** 0.5),
        "credit/gain/share_positive": pytest.approx(4 / 7),
        "credit/gain/turn_0": pytest.approx(0.5 / 5),
        "credit/gain/turn_1": pytest.approx(0.25 / 2),
    }


def test_without_any_gain_only_the_count_is_told(turns):
    step = by_hand(turns)
    step.tables.has_reward_B_K[:7] = False  # the lost row's stays
    assert gain_metrics(step) == {"credit/gain/turns": 0}
    assert not any("clip_scale" in name for name in credit_metrics(step, GROUP_SIZE))


def test_turns_advantages_and_clip_scales(turns):
    got = credit_metrics(by_hand(turns), GROUP_SIZE)
    told = {name: value for name, value in got.items() if "/groups/" not in name}
    assert told == {
        "credit/invalid_rows": 1,
        "credit/nonfinite_outcomes": 0,
        "credit/nonfinite_rewards": 0,
        "credit/turns_without_reward": 0,
        "credit/turn_groups": 0,
        "credit/turn_groups_of_one": 3,
        "credit/turn_groups_of_two": 0,
        "credit/turns_per_row": pytest.approx((3 + 2 + 2 + 1 + 2 + 2 + 3) / 7),
        "credit/advantage/turn_0": pytest.approx((1 + 3 - 2 - 1 + 2 + 3) / 6),
        "credit/advantage_abs/turn_0": pytest.approx(12 / 6),
        "credit/advantage/turn_1": pytest.approx((2 - 4) / 2),
        "credit/advantage_abs/turn_1": pytest.approx(6 / 2),
        "credit/advantage/answer": pytest.approx((4 - 2 + 5) / 7),
        "credit/advantage_abs/answer": pytest.approx(11 / 7),
        "credit/clip_scale/mean": pytest.approx(1.0),  # three 1.5, three 0.5, one 1
        "credit/clip_scale/std": pytest.approx((6 * 0.25 / 7) ** 0.5),
    }


def test_groups_without_outcome_spread_are_split_into_solved_and_failed(turns):
    got = credit_metrics(by_hand(turns), GROUP_SIZE)
    assert {name: value for name, value in got.items() if "/groups/" in name} == {
        "credit/groups/groups": 4,
        "credit/groups/singleton": 1,
        "credit/groups/short": 1,
        "credit/groups/tied": 2,
        "credit/groups/all_solved": 1,
        "credit/groups/all_failed": 1,
    }
    assert credit_metrics(by_hand(turns), 3)["credit/groups/short"] == 4


@pytest.mark.parametrize("mode", NO_TABLES)
@pytest.mark.parametrize("order", [list(range(11)), [10, 0, 1, 2, 9, 3, 4, 5, 6, 7, 8]])
def test_padding_rows_change_no_metric(tokenizer, mode, order):
    """Wherever they stand: verl reorders the batch when it balances its length over the workers."""

    def metrics(rows, gains, outcomes, groups):
        turns = turn_batch(rows, tokenizer)
        step = credited(turns, gains, outcomes, groups, info_gain_norm_mode=mode)
        return row_metrics(turns) | gain_metrics(step) | credit_metrics(step, GROUP_SIZE)

    gains = [*GAINS[:6], [0.25, 0.5], GAINS[7]]  # without a gap, which one of the modes refuses
    columns = (
        BATCH + [padding_row(BATCH[7])] * 3,
        gains + [[]] * 3,
        OUTCOMES + [0.0] * 3,
        GROUPS + ["pad"] * 3,
    )
    padded = metrics(*([column[place] for place in order] for column in columns))
    assert padded == metrics(BATCH, gains, OUTCOMES, GROUPS)
