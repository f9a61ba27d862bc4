"""Values by the names that an environment gives its states, beside their exact values in the gambler's ruin.

Rooms 1 to 3 of a dark corridor look alike; room 0 is a pit, room 4 the goal, and each step goes left or right with equal
chances. Room s is worth s / 4, whatever the turn.
"""

import random

import pytest
import torch

from kit.byte_world import make_tokenizer
from kit.turn_rows import Row, estimate, step_inputs, turn_batch
from verl_credit.turns.rollout.book import RowRecord

PROMPTS, GOAL = 8, 4


def walk(draws):
    """The rooms of a rollout before its turns, and its outcome."""
    rooms, at = [], 2
    while 0 < at < GOAL:
        rooms.append(at)
        at += draws.choice((-1, 1))
    return rooms, float(at == GOAL)


def record_of(rooms):
    progress = [room / GOAL for room in rooms[1:]]
    names = [f"room {room}" for room in rooms]
    return RowRecord(states=names, signals={"progress": progress} if progress else {})


def error_of(rollouts, provider="state", **changes):
    """The mean distance of the learned values from the exact ones, over the turns of a step."""
    draws = random.Random(0)
    walks = [walk(draws) for _ in range(PROMPTS * rollouts)]
    rows = [
        Row(
            ("go", "dark") * (len(rooms) - 1) + ("go",),
            f"corridor {place // rollouts}",
            record=record_of(rooms),
        )
        for place, (rooms, _) in enumerate(walks)
    ]
    turns = turn_batch(rows, make_tokenizer())
    given = {"info_gain_norm_mode": "turn_gae", "turn_signal": "none", "turn_values": provider} | changes
    inputs = step_inputs(
        turns, [[None] * (len(rooms) - 1) for rooms, _ in walks], signals={}, lam=0.5, **given
    )
    groups = [place // rollouts for place in range(len(walks))]
    step = estimate(inputs, turns, [outcome for _, outcome in walks], groups)
    found = step.tables.optional["value_B_K1"]
    errors = [
        (found[row, k] - room / GOAL).abs()
        for row, (rooms, _) in enumerate(walks)
        for k, room in enumerate(rooms)
    ]
    return float(torch.stack(errors).mean())


@pytest.mark.slow  # 512 rollouts
def test_values_by_the_names_of_states_come_to_the_exact_ones_as_rollouts_grow():
    few, more, many = (error_of(rollouts) for rollouts in (4, 16, 64))
    assert few > 0.2 > more > 0.1 > many
    assert error_of(64, turn_anchor="observation") > 0.15  # all observations are alike


@pytest.mark.slow
def test_a_named_anchor_is_the_default_one_and_progress_is_a_feature_of_values():
    assert error_of(4, turn_anchor="state") == error_of(4)
    assert error_of(16, "column:progress") < 0.1 < 0.15 < error_of(16, "group")
