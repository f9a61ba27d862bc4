"""Lakes: values by dynamic programming against continuations through the sampler, in both contexts."""

import json
from functools import partial

import numpy as np
import pytest

from kit.lake_world import HORIZON, lake_world
from lakes import text
from lakes.dynamic import backward, state_values, text_probabilities
from lakes.integrity import compare
from lakes.lakes import Lake, make_lakes
from lakes.measure import of_states
from lakes.score import score_moves, states_to_value
from lakes.world import roll
from verl_credit.study.fidelity.values import true_advantages, values_of
from verl_credit.worlds.rollouts.rollout import Start
from verl_credit.worlds.rollouts.sampler import digest

M = 64


def rolled(world, sampler, count=2, seed=0):
    return roll(sampler, world, [Start(state, count, seed, "rollout") for state in world.starts()])


def measured(context, slippery, memory=0.0, seed=0):
    world, decoder, sampler = lake_world(context, slippery, memory)
    if context == "state":
        ice = [(number, cell) for number, lake in enumerate(world.lakes) for cell in lake.ice]
        states = [world.start(*at, turn) for at in ice for turn in range(HORIZON)]
    else:
        cells = [0, 4, 9] if slippery else world.lakes[0].ice
        starts = [Start(world.start(0, cell), 3, seed, "rollout") for cell in cells]
        states = states_to_value(world, roll(sampler, world, starts))
    values = values_of(states, partial(roll, sampler, world), continuations=M, seed=seed)
    return compare(values, of_states(world, states, state_values(world, decoder)))


@pytest.mark.slow
@pytest.mark.parametrize("slippery", [False, True])
@pytest.mark.parametrize("context", ["state", "history"])
def test_continuations_scatter_about_the_values_of_dynamic_programming(context, slippery):
    """Where the policy makes nothing of its history, the value of the state is that of the history, too."""
    found = measured(context, slippery)
    assert found.contexts > 15
    assert abs(found.z_of_mean) < 4 and abs(found.fit.z) < 4


def test_a_policy_that_remembers_is_not_valued_by_the_state():
    found = measured("history", False, memory=0.5)
    assert found.z_of_mean < -4 and found.fit.z > 4 and found.error > 0.05
    assert abs(measured("state", False, memory=0.5).fit.z) < 4  # it has nothing to remember there


def test_worked_values():
    """Two moves from the goal's left neighbour: right at once, or down against the edge and then right."""
    lake = Lake("lake 1", ("SFFF", "FHFH", "FFFH", "HFFG"), False)
    chosen = {(cell, turn): [0.1, 0.2, 0.3, 0.0] for cell in lake.ice for turn in range(2)}
    value = backward(lake, 2, chosen)
    assert value[14, 1] == pytest.approx(0.3) and value[14, 0] == pytest.approx(0.3 + 0.2 * 0.3)
    assert value[13, 0] == pytest.approx(0.3 * 0.3) and value[0, 0] == 0
    slippery = Lake("lake 1", lake.rows, True)
    assert backward(slippery, 1, {key: [0.1, 0.2, 0.3, 0.0] for key in chosen})[14, 0] == pytest.approx(
        0.5 / 3
    )


def test_a_slippery_move_goes_straight_or_to_either_side():
    """On gymnasium's map: the corner, the cell above a hole, and the goal's left neighbour, each third once."""
    third = pytest.approx(1 / 3)
    firm, lake = make_lakes(False)[0], make_lakes(True)[0]
    assert all(
        sum(at.probability for at in landings) == pytest.approx(1) for landings in lake.landings.values()
    )
    assert {at.cell: at.probability for at in lake.landings[0, 0]} == {0: pytest.approx(2 / 3), 4: third}
    assert {(at.cell, at.ends): at.probability for at in lake.landings[1, 1]} == {
        (0, False): third, (5, True): third, (2, False): third,
    }  # fmt: skip
    assert {(at.cell, at.reward): at.probability for at in lake.landings[14, 2]} == {
        (14, 0): third, (15, 1): third, (10, 0): third,
    }  # fmt: skip
    moves = [firm.landings[6, move] for move in range(4)]
    assert [(at.cell, at.reward, at.ends) for (at,) in moves] == [
        (5, 0, True), (10, 0, False), (7, 0, True), (2, 0, False),
    ]  # fmt: skip


@pytest.mark.slow
def test_the_script_trains_measures_and_prints_its_tables(tmp_path, monkeypatch, capsys):
    """And again from its file; the value of a policy that it trained is that of continuations."""
    from lakes import run

    monkeypatch.setattr("sys.argv", ["run.py", str(tmp_path), "--tiny"])
    run.main()
    printed = capsys.readouterr().out
    state, history = json.loads((tmp_path / "lakes.json").read_text())["entries"]
    assert abs(state["dynamic"]["z_of_mean"]) < 4 and abs(state["dynamic"]["chi_square_z"]) < 4
    assert 0 < state["success"] < 1 and state["credits"]["turn_gae, lam 0, exact V"]["pearson"]["value"] == 1
    assert history["credits"]["turn_gae, lam 0, V by 2"]
    monkeypatch.setattr("sys.argv", ["run.py", str(tmp_path), "--again"])
    run.main()
    assert printed.endswith(capsys.readouterr().out)


def test_every_trajectory_draws_its_own_transition():
    """With the probabilities of the table, whatever else the same context and text have drawn; and by the seed alone."""
    world, _, sampler = lake_world("state", True)
    (cell, move), landings = next(item for item in world.lakes[0].landings.items() if len(item[1]) == 3)
    start = world.start(0, cell)
    groups = roll(sampler, world, [Start(start, 3000, 0, "a"), Start(start, 3000, 0, "b")])
    firsts = [[t.steps[0] for t in group if t.steps[0].turn_ids == world.calls[move]] for group in groups]
    for steps in firsts:
        counts = np.bincount([-1 if s.next is None else s.next.cell for s in steps if s.next], minlength=16)
        for at in landings:
            if not at.ends:
                p = at.probability
                assert abs(counts[at.cell] - len(steps) * p) < 4 * (len(steps) * p * (1 - p)) ** 0.5
    assert groups[0] != groups[1]
    assert roll(sampler, world, [Start(start, 3000, 0, "b")]) == groups[1:]


def test_what_the_policy_did_and_what_the_ice_did():
    """A* and luck sum to r - V(s_0); with luck, A* has mean 0 over the policy's moves, and luck over the landings."""
    for slippery in (False, True):
        world, decoder, sampler = lake_world("state", slippery)
        groups = rolled(world, sampler)
        known = state_values(world, decoder)
        exact = of_states(world, states_to_value(world, groups), known)
        turns, luck = score_moves(world, groups, exact)
        both = np.array([turn.a_star for turn in turns]) + luck
        assert both == pytest.approx(true_advantages(groups, exact))
        assert (np.abs(luck).max() > 0.05) == slippery
        state = groups[0][0].steps[0].state
        probabilities = text_probabilities(decoder, [state.ids], world.calls)[0].tolist()
        q = [
            sum(
                p * (s.reward if s.next is None else known[digest(s.next.ids)].value)
                for p, s in world.chances(state, call)
            )
            for call in world.calls
        ]
        assert sum(p * x for p, x in zip(probabilities, q, strict=True)) == pytest.approx(
            exact[digest(state.ids)].value
        )


def test_a_turn_is_a_move_if_it_is_the_call_to_the_letter():
    world, _, _ = lake_world("history", False)
    tokenizer = text.grid_tokenizer(2, HORIZON)
    start = world.start(0, 0)
    for move, direction in enumerate(("left", "down", "right", "up")):
        written = f'<tool_call>\n{{"name": "move", "arguments": {{"direction": "{direction}"}}}}\n</tool_call><|im_end|>'
        ids = tuple(tokenizer.encode(written))
        assert world.move_of(ids) == move and len(ids) == 3
        step = world.drawn(start, ids, 0.0)
        assert step.next.cell == (0, 4, 1, 0)[move] and step.reward is None
    told = tokenizer.decode(step.next.ids)
    assert told.startswith(
        "<|im_start|>user\nlake 1, row 1, column 1, moves left: 5<|im_end|>\n<|im_start|>assistant\n<tool_call>"
    )
    assert told.endswith(
        "<tool_response>\nrow 1, column 1, moves left: 4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    for other in (text.STOP, "<tool_call>", text.call(0)[:-1], text.call(0) + " "):
        step = world.drawn(start, tuple(tokenizer.encode(other)), 0.5)
        assert step.next is None and step.reward == 0
    last = world.start(0, 0, HORIZON - 1)
    assert world.drawn(last, world.calls[1], 0.0).reward == 0
