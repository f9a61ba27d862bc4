"""Rollouts that a step kept are the trajectories that they were sampled as."""

import pytest

from kit.choice_world import TURNS, world
from verl_credit.errors import PreflightError
from verl_credit.study.fidelity.turn_rows import kept_trajectories, turn_batch
from verl_credit.worlds.rollouts.rollout import Start, roll

QUESTIONS = 3


@pytest.fixture(scope="module")
def sampled():
    """(trajectories, a step's table of them)."""
    sampler, protocol, states = world(QUESTIONS)
    groups = roll(sampler, protocol, [Start(state, 4, 0, "rollout") for state in states])
    paths = [path for group in groups for path in group]
    batch = turn_batch(paths, [{"reward_model": {"ground_truth": ""}}] * QUESTIONS)
    turns = [
        ids[: len(row)] for ids, row in zip(batch.turn_ids_B_T.tolist(), batch.response_ids, strict=True)
    ]
    columns = {"row": [10 + i for i in range(len(paths))], "turn": turns}
    return paths, columns | {"prompt_ids": batch.prompt_ids, "response_ids": batch.response_ids}


def kept(columns, questions=QUESTIONS):
    _, protocol, states = world(questions)
    return kept_trajectories(columns, states, protocol)


def test_they_are_what_was_sampled(sampled):
    paths, columns = sampled
    assert len({len(path.steps) for path in paths}) > 1
    assert kept(columns) == {10 + i: path for i, path in enumerate(paths)}


def test_a_row_that_ended_before_its_tools_answer_is_left_out(sampled):
    paths, columns = sampled
    row = next(i for i, path in enumerate(paths) if 1 < len(path.steps) <= TURNS)
    cut = columns["turn"][row].index(1)  # the first turn, and what its tool said
    columns = {
        **columns,
        "turn": [ids[:cut] if i == row else ids for i, ids in enumerate(columns["turn"])],
        "response_ids": [ids[:cut] if i == row else ids for i, ids in enumerate(columns["response_ids"])],
    }
    assert kept(columns).keys() == {10 + i for i in range(len(paths))} - {10 + row}


def test_a_prompt_that_the_data_has_not_is_refused(sampled):
    with pytest.raises(PreflightError, match="the prompt of row 18 is not among the 2 of"):
        kept(sampled[1], questions=2)
