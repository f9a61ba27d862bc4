"""Rollouts of a run as trajectories: contexts, ends, searches; and outcomes that are no answer to "right or wrong?"."""

from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from verl.utils import tensordict_utils as tu

from kit.fake_store import FakeStore
from verl_credit.errors import IntegrityError
from verl_credit.host.rollout.engine_client import DRAW, REPLAY
from verl_credit.host.step.measured_rows import (
    Generator,
    Row,
    Wanted,
    outcome_of,
    parts_of,
    pieces_of,
    reaches,
    replayed,
    rows_of,
    trajectory_of,
)
from verl_credit.turns.rollout.book import RowRecord


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
        ({"turn_ids": [-1] * 6}, "no token of the policy's"),
    ],
)
def test_a_row_that_does_not_count_says_why(changes, fault):
    assert row(**changes).fault == fault


def behind(turns, **changes):
    """A row whose agent loop says that so many turns stood already."""
    searches = [{"turn": 0, "query": "a", "pages": [7]}]
    return row(record=RowRecord(searches=searches, replayed=turns).as_dict(), **changes)


def test_a_replay_is_the_turns_and_a_context_their_observations_too():
    state = row().states()[1]
    assert replayed(behind(1), [(10, 11)]) and reaches(behind(1), state)
    other = behind(1, response_ids=[10, 11, 30, 32, 20, 40])
    assert replayed(other, [(10, 11)]) and not reaches(other, state)
    assert not replayed(behind(1, response_ids=[10, 12, 30, 31, 20, 40]), [(10, 11)])
    assert replayed(behind(0), []) and replayed(behind(2), [(10, 11), (20,)])


@pytest.mark.parametrize(
    "ids, turn_ids, begins",
    [
        ([10, 11], [0, 0], True),  # it ended after the first of the turns
        ([10, 11, 30, 31, 20], [0, 0, -1, -1, 1], True),  # full in the middle of the second
        ([10, 11, 30, 31, 22], [0, 0, -1, -1, 1], False),
        ([12], [0], False),
    ],
)
def test_a_row_may_end_on_the_way(ids, turn_ids, begins):
    assert replayed(behind(2, response_ids=ids, turn_ids=turn_ids), [(10, 11), (20, 21)]) is begins


@pytest.mark.parametrize("says", [-1, 0, 2])
def test_an_agent_loop_has_to_say_that_it_began_there(says):
    """One that knows nothing of it may have written the same turns by itself."""
    assert not replayed(behind(says), [(10, 11)])


@pytest.mark.parametrize("scores, reward, outcome", [({"em": 1.0, "f1": 0.4}, 0.7, 1.0), ({}, 0.0, 0.0)])
def test_the_outcome_is_em_or_the_reward(scores, reward, outcome):
    assert outcome_of(scores, reward) == outcome


@pytest.mark.parametrize("scores, reward", [({}, 0.35), ({"em": 0.5}, 1.0), ({}, -1.0)])
def test_an_outcome_that_is_neither_right_nor_wrong_is_refused(scores, reward):
    with pytest.raises(IntegrityError, match=f"reward is {reward:g}.*'em'"):
        outcome_of(scores, reward)


@pytest.mark.parametrize(
    "counts, parts",
    [([], []), ([4, 4, 4], [[4, 4], [4]]), ([9], [[8], [1]]), ([2, 9, 2, 6], [[2], [8], [1, 2], [6]])],
)
def test_no_more_rollouts_at_a_time_than_a_step_has(counts, parts):
    wanted = [Wanted(question, count, f"q{question}", ()) for question, count in enumerate(counts)]
    pieces = [piece for one in wanted for piece in pieces_of(one, 8)]
    assert [[one.count for one in part] for part in parts_of(pieces, 8)] == parts
    assert len({one.name for one in pieces}) == len(pieces) and {one.name for one in wanted} <= {
        one.name for one in pieces
    }


class Made(Generator):
    """``faults``: of the next rollouts, in order; then there are none."""

    def __init__(self, faults=()):
        super().__init__(SMALL, [], None, None, None, step=0)
        self.asked, self.faults = [], list(faults)

    def _made(self, wanted):
        self.asked.append([(one.question, one.count, one.name) for one in wanted])
        return [[self._row(one) for _ in range(one.count)] for one in wanted]

    def _row(self, one):
        fault = self.faults.pop(0) if self.faults else ""
        return row(question=one.question, record=RowRecord(tool_fault=fault).as_dict())


SMALL = OmegaConf.create(
    {
        "algorithm": {"turn_ids": "auto"},
        "data": {"train_batch_size": 2},
        "actor_rollout_ref": {"rollout": {"n": 4}},
    }
)


def test_rollouts_come_as_they_are_made():
    made = Made()
    wanted = [Wanted(0, 4, "a", ()), Wanted(1, 9, "b", ()), Wanted(2, 3, "c", ())]
    groups = made(wanted)
    assert [row.question for row in next(groups)] == [0] * 4 and len(made.asked) == 1
    assert [[row.question for row in group] for group in groups] == [[1] * 9, [2] * 3]
    assert made.asked == [[(0, 4, "a")], [(1, 8, "b")], [(1, 1, "b, part 1"), (2, 3, "c")]]


def test_a_rollout_that_a_fault_ended_is_drawn_again():
    made = Made(["", "deadline", "", "down", "down"])
    (first, second) = made([Wanted(0, 2, "a", ()), Wanted(1, 2, "b", ())])
    assert not any(row.fault for row in [*first, *second]) and len(first) == len(second) == 2
    assert made.asked[1:] == [[(0, 1, "a, again 1"), (1, 1, "b, again 1")], [(0, 1, "a, again 2")]]


def test_a_fault_every_time_ends_it():
    with pytest.raises(IntegrityError, match="1 rollouts failed 4 times \\(deadline\\)"):
        list(Made(["deadline"] * 4)([Wanted(0, 1, "a", ())]))


class Asked(Exception):
    """The agent loops have their rows."""


def test_agent_loops_are_told_the_policys_step_and_what_stands_already(monkeypatch):
    """Without the step a rollout on a run's server would be scored, or not, as one of another step."""
    FakeStore().install(monkeypatch)
    given = []

    def generate_sequences(batch):
        given.append(batch)
        raise Asked

    watch = SimpleNamespace(begin=lambda count: None)
    loops = SimpleNamespace(generate_sequences=generate_sequences)
    data = [{"raw_prompt": [question]} for question in ("first", "second")]
    with pytest.raises(Asked):
        made = Generator(SMALL, data, watch, loops, None, step=7)
        next(made([Wanted(1, 4, "a", ((10, 11),)), Wanted(0, 2, "b", ())]))
    (batch,) = given
    told = {name: tu.get_non_tensor_data(batch, name, None) for name in ("global_steps", "validate")}
    assert told == {"global_steps": 7, "validate": True}
    columns = ("raw_prompt", "__rollout_n__", DRAW, REPLAY)
    assert [[tu.get(batch, name)[row] for name in columns] for row in range(1)] == [
        [["second"], 4, "a", "[[10, 11]]"]
    ]


def test_an_agent_loop_that_returns_several_rows_is_not_measured(monkeypatch):
    turns = SimpleNamespace(
        prompt_ids=[[1]], response_ids=[[10]], turn_ids_B_T=torch.tensor([[0, -1]]), records=[{}], scores=[{"em": 1.0}],
        turn_rewards=[[]],
    )  # fmt: skip
    rewards = {"rm_scores": torch.nested.as_nested_tensor([torch.tensor([1.0])], layout=torch.jagged)}
    monkeypatch.setattr(
        "verl_credit.host.step.measured_rows.store.fetch_turn_batch", lambda batch, ids: turns
    )
    monkeypatch.setattr("verl_credit.host.step.measured_rows.store.read", lambda batch, *fields: rewards)
    ((found,),) = rows_of(SimpleNamespace(keys=["uid_of_it_3_0"]), {"uid_of_it": 5})
    assert found.question == 5 and found.turn_ids == [0] and found.outcome == 1.0
    with pytest.raises(IntegrityError, match="rollout uid_of_it_3_1: .*several rows"):
        rows_of(SimpleNamespace(keys=["uid_of_it_3_1"]), {"uid_of_it": 5})
