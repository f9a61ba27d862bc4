"""Rollouts of a run as trajectories: contexts, ends, searches; and outcomes that are no answer to "right or wrong?"."""

import pytest

from verl_credit.errors import IntegrityError
from verl_credit.host.measure.generate import Wanted, outcome_of, parts_of
from verl_credit.host.measure.rows import Row, reaches, replayed, trajectory_of
from verl_credit.turns.book import RowRecord


def row(**changes):
    """Two turns: a search with two queries, an answer. Tokens 30, 31 are the tool's, 40 closes the row."""
    searches = [{"turn": 0, "query": q, "pages": [p]} for q, p in (("a", 7), ("b", 8))]
    given = {
        "question": 3,
        "prompt_ids": [1, 2],
        "response_ids": [10, 11, 30, 31, 20, 40],
        "turn_ids": [0, 0, -1, -1, 1, -1],
        "record": RowRecord(searches=searches, n_searches=2).as_dict(),
        "scores": {"em": 1.0},
        "turn_rewards": [None],
        "outcome": 1.0,
    }
    return Row(**given | changes)


def test_contexts_are_all_tokens_before_a_turn():
    steps = trajectory_of(row()).steps
    assert [step.state.ids for step in steps] == [(1, 2), (1, 2, 10, 11, 30, 31)]
    assert [step.turn_ids for step in steps] == [(10, 11), (20,)]
    assert [(step.state.question, step.state.prompt_length, step.state.turn) for step in steps] == [
        (3, 2, 0),
        (3, 2, 1),
    ]
    assert steps[0].next == steps[1].state and steps[0].reward is None
    assert steps[1].next is None and steps[1].reward == trajectory_of(row()).reward == 1.0


def test_searches_stand_at_their_turn():
    first, last = trajectory_of(row()).steps
    assert [call.query for call in first.calls] == ["a", "b"] and first.pages == (("7",), ("8",))
    assert last.calls == last.pages == ()


@pytest.mark.parametrize(
    "changes, fault",
    [
        ({}, ""),
        ({"record": RowRecord(tool_fault="timeout").as_dict()}, "timeout"),
        ({"turn_ids": [-1] * 6}, "no turn"),
    ],
)
def test_a_row_that_does_not_count_says_why(changes, fault):
    assert row(**changes).fault == fault


def test_a_replay_is_the_turns_and_a_context_their_observations_too():
    state = row().states()[1]
    assert replayed(row(), [(10, 11)]) and reaches(row(), state)
    other = row(response_ids=[10, 11, 30, 32, 20, 40])
    assert replayed(other, [(10, 11)]) and not reaches(other, state)
    assert not replayed(row(response_ids=[10, 12, 30, 31, 20, 40]), [(10, 11)])
    ended = row(response_ids=[10, 11], turn_ids=[0, 0])
    assert replayed(ended, [(10, 11), (20,)]) and not reaches(ended, state)


@pytest.mark.parametrize("scores, reward, outcome", [({"em": 1.0, "f1": 0.4}, 0.7, 1.0), ({}, 0.0, 0.0)])
def test_the_outcome_is_em_or_the_reward(scores, reward, outcome):
    assert outcome_of(scores, reward) == outcome


@pytest.mark.parametrize("scores, reward", [({}, 0.35), ({"em": 0.5}, 1.0), ({}, -1.0)])
def test_an_outcome_that_is_neither_right_nor_wrong_is_refused(scores, reward):
    with pytest.raises(IntegrityError, match=f"reward is {reward:g}.*'em'"):
        outcome_of(scores, reward)


@pytest.mark.parametrize(
    "counts, parts",
    [([], []), ([4, 4, 4], [[4, 4], [4]]), ([9], [[9]]), ([2, 9, 2, 6], [[2], [9], [2, 6]])],
)
def test_no_more_rollouts_at_a_time_than_a_step_has(counts, parts):
    wanted = [Wanted(question, count, "", ()) for question, count in enumerate(counts)]
    found = list(parts_of(wanted, 8))
    assert [[one.count for one in part] for part in found] == parts
    assert [one for part in found for one in part] == wanted
