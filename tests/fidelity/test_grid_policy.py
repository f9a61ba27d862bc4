"""A trained policy on the lakes: it walks, its folder is used again, and its exact values are those of continuations."""

from functools import partial

import numpy as np
import pytest

from verl_credit.fidelity.grid.demos import WalkStyle, good_moves, write_walks
from verl_credit.fidelity.grid.dynamic import state_values
from verl_credit.fidelity.grid.integrity import compare
from verl_credit.fidelity.grid.lakes import make_lakes
from verl_credit.fidelity.grid.policy import GridConfig, grid_subject
from verl_credit.fidelity.grid.text import STOP, call, grid_tokenizer
from verl_credit.fidelity.grid.world import GridWorld
from verl_credit.fidelity.rollout import roll
from verl_credit.fidelity.sampler import digest
from verl_credit.fidelity.values import values_of

QUICK = GridConfig("state", slippery=False, horizon=6, walks=600, layers=1, steps=100)


@pytest.mark.slow
def test_a_trained_policy(tmp_path):
    subject = grid_subject(tmp_path / "policy", QUICK)
    world, exact = subject.world, state_values(subject.world, subject.decoder())
    right = np.mean([exact[digest(start.ids)].value for start in world.starts()])
    assert 0.2 < right < 0.8
    states = [world.start(0, cell, turn) for cell in world.lakes[0].ice for turn in range(world.horizon)]
    found = compare(
        values_of(states, partial(roll, subject.sampler(), world), continuations=64, seed=0), exact
    )
    assert found.contexts > 30 and abs(found.z_of_mean) < 4 and abs(found.fit.z) < 4
    said = []
    again = grid_subject(tmp_path / "policy", QUICK, progress=lambda share, text: said.append(text))
    assert (
        len(said) == 1 and said[0].startswith("using") and state_values(again.world, again.decoder()) == exact
    )


@pytest.mark.parametrize("context", ["state", "history"])
def test_walks_are_careful_or_careless_and_sometimes_give_up(context):
    lakes = make_lakes(False)
    world = GridWorld(grid_tokenizer(), lakes, context=context)
    walks = write_walks(world, WalkStyle(stop=0.1), 200, seed=0)
    assert walks == write_walks(world, WalkStyle(stop=0.1), 200, seed=0)
    assert all([by_policy for _, by_policy in walk] == [False, True] * (len(walk) // 2) for walk in walks)
    assert (max(map(len, walks)) > 2) == (context == "history")
    assert {walk[0][0].count(": 10") for walk in walks} == {0, 1}
    written = [text for walk in walks for text, by_policy in walk if by_policy]
    assert abs(written.count(STOP) / len(written) - 0.1) < 0.05
    assert set(written) == {STOP, *map(call, range(4))}


def test_good_moves_are_the_shortest_ways():
    good = good_moves(make_lakes(False)[0])
    assert good[14] == [2] and good[0] == [1, 2] and good[9] == [1, 2] and good[3] == [0]
    assert good_moves(make_lakes(True)[0])[0] == [
        0
    ]  # on ice that slips: away from the holes, against the edge
