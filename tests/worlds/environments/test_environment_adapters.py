"""Adapters: laws over every one of them, and what each shows of the package that it stands for."""

import random
from itertools import zip_longest

import pytest

from kit.environments import CORRIDOR
from verl_credit.worlds.environments.process import Rollouts, load

gymnasium, _ = pytest.importorskip("gymnasium"), pytest.importorskip("minigrid")

LAKE = {"id": "FrozenLake-v1", "is_slippery": True}
DOOR = {"id": "MiniGrid-DoorKey-5x5-v0"}
KINDS = {
    "lake": ("gymnasium", LAKE),
    "taxi": ("gymnasium", {"id": "Taxi-v4"}),
    "cliff": ("gymnasium", {"id": "CliffWalking-v1"}),
    "blackjack": ("gymnasium", {"id": "Blackjack-v1"}),
    "pole": ("gymnasium", {"id": "CartPole-v1"}),
    "door": ("minigrid", DOOR),
    "own": (CORRIDOR, {"length": 5, "slip": 0.5}),
}


def walk(rollouts, row, kind, seed):
    """Yields the answers to actions that are drawn by a generator of their own."""
    draws = random.Random(0)
    answer = rollouts.answer(row, "reset", *KINDS[kind], seed, {})
    for _ in range(12):
        yield answer
        if answer["terminated"] or answer["truncated"]:
            return
        answer = rollouts.answer(row, "step", draws.choice(answer["actions"]))


@pytest.mark.parametrize("kind", KINDS)
def test_equal_seeds_and_actions_have_equal_steps_also_beside_another(kind):
    alone = [[*walk(Rollouts(4000), 0, kind, seed)] for seed in (3, 4)]
    rollouts = Rollouts(4000)
    both = [*zip_longest(*(walk(rollouts, row, kind, seed) for row, seed in enumerate((3, 4))))]
    for walked, beside in zip(alone, zip(*both, strict=True), strict=True):
        assert walked == [answer for answer in beside if answer is not None]


@pytest.mark.parametrize("kind", ["lake", "taxi", "cliff"])
def test_a_state_has_one_name_after_a_reset_and_after_a_step(kind):
    env = load("gymnasium")(**KINDS[kind][1])
    names = {env.reset(seed, {}).state for seed in range(5)}
    assert all(name == str(int(name)) for name in names)
    step = env.reset(1, {})
    for _ in range(5):
        step = env.step(step.actions[0])
        assert step.state == str(int(env.env.unwrapped.s))


def test_the_known_walk_over_the_lake_earns_one_and_says_no_success():
    env = load("gymnasium")("FrozenLake-v1", is_slippery=False)
    assert env.reset(0, {}).observation == "[S]FFF\nFHFH\nFFFH\nHFFG"
    steps = [env.step(action) for action in ("down", "down", "right", "right", "down", "right")]
    assert [step.reward for step in steps] == [0, 0, 0, 0, 0, 1] and steps[-1].terminated
    assert steps[-1].success is None and steps[0].observation.endswith("SFFF\n[F]HFH\nFFFH\nHFFG")
    assert not env.step("jump").valid


def test_a_taxi_tells_passenger_and_destination_apart():
    board = load("gymnasium")("Taxi-v4").reset(3, {}).observation
    assert "<R>" in board and "[ ]" in board and "(Y)" in board


def test_actions_of_other_spaces_are_json_and_other_names_are_taken():
    env = load("gymnasium")("Pendulum-v1")
    env.reset(0, {})
    assert env.step("[0.5]").valid and not any(
        env.step(bad).valid for bad in ("[5]", "0.5]", "[1, 2]", '"x"', "null")
    )
    named = load("gymnasium")("CartPole-v1", actions={"west": 0, "east": 1})
    assert named.reset(0, {}).actions == ["west", "east"] and named.step("east").reward == 1
    with pytest.raises(ValueError, match="east"):
        load("gymnasium")("CartPole-v1", actions={"west": 0, "east": 2})


def test_the_walk_to_the_goal_opens_the_door_and_its_progress_has_two_halves():
    env = load("minigrid")("MiniGrid-DoorKey-5x5-v0")
    first = env.reset(1, {})
    assert first.observation.startswith("Task: use the key") and first.progress == 0
    walk = "pickup", "left", "toggle", "forward", "forward", "right", "forward"
    steps = [env.step(action) for action in walk]
    progress = [step.progress for step in (first, *steps)]
    assert sorted(progress) == progress and {*progress} == {0, 0.5, 1.0}
    assert "open yellow door: here" in steps[3].observation.splitlines()
    assert "open yellow door: 1 behind" in steps[4].observation.splitlines()
    assert steps[-1].terminated and steps[-1].reward == pytest.approx(1 - 0.9 * len(steps) / 250)
    assert not env.step("fly").valid


def test_the_places_of_things_are_as_seen_from_the_agent():
    env = load("minigrid")("MiniGrid-Empty-5x5-v0", actions=["left", "right", "forward"])
    first = env.reset(0, {})  # at (1, 1), looking to the right; the goal is at (3, 3)
    lines = first.observation.splitlines()
    assert lines[1:] == ["You carry nothing.", "Walls: left.", "green goal: 2 ahead, 2 right"]
    assert first.progress is None and first.actions == ["left", "right", "forward"]
    assert env.step("left").observation.splitlines()[-1] == "green goal: 2 behind, 2 right"
    assert env.step("right").state == first.state
    with pytest.raises(ValueError, match="fly"):
        load("minigrid")("MiniGrid-Empty-5x5-v0", actions=["fly"])


def test_what_is_carried_is_part_of_the_states_name():
    env = load("minigrid")("MiniGrid-DoorKey-5x5-v0")
    env.reset(1, {})
    state = env._seen().state
    env.grid.carrying = type("Ball", (), {"type": "ball", "color": "red"})()
    assert env._seen().state != state and "You carry red ball." in env._seen().observation
