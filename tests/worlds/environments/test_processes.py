"""Processes of environments: every fault of an environment ends as one of five codes, and other rollouts go on."""

import asyncio
import os
import re
import signal
from pathlib import Path

import pytest

from kit.environments import CORRIDOR, FAULTY
from verl_credit.worlds.environments.pool import Fault, Pool

pytestmark = pytest.mark.slow  # each starts processes


def play(coroutine_of, path=FAULTY, kwargs=None, **options):
    async def played():
        pool = Pool(path, kwargs or {}, **{"processes": 1, **options})
        try:
            return await coroutine_of(pool)
        finally:
            await pool.end()

    return asyncio.run(played())


async def fault_of(pool, options, actions=("right",)):
    with pytest.raises(Fault) as caught:
        rollout, _ = await pool.reset(0, options)
        for action in actions:
            await pool.step(rollout, action)
    return caught.value.code, caught.value.detail


def test_a_rollout_from_reset_to_its_end():
    async def one(pool):
        rollout, first = await pool.reset(0, {})
        steps = [await pool.step(rollout, action) for action in ("left", "right", "right")]
        await pool.close(rollout)
        return first, *steps

    first, left, right, last = play(one, CORRIDOR)
    assert (first.observation, first.reward, first.actions) == ("room 0 of 2", None, ["left", "right"])
    assert [step.state for step in (left, right, last)] == ["s0", "s1", "s2"]
    assert (last.reward, last.terminated, last.success, last.progress) == (1.0, True, True, 1.0)


def test_every_fault_of_a_step_is_named_with_what_was_seen():
    async def all_of_them(pool):
        good, _ = await pool.reset(0, {"fault": "prints"})
        assert (await pool.step(good, "right")).state == "s1"  # what an environment prints is no answer
        kinds = "raises", "exits", "none", "dies"
        found = [await fault_of(pool, {"fault": kind}) for kind in kinds]
        return [*found, await fault_of(pool, {"fault": "raises", "at_reset": True}, actions=())]

    expected = (
        ("env_raised", "KeyError: 'no such door'"),
        ("env_raised", "SystemExit: 3"),
        ("env_bad_answer", "NoneType"),
        ("env_lost", "exit code 7"),
        ("env_raised", "KeyError: 'no such door'"),
    )
    for (code, detail), (wanted, seen) in zip(play(all_of_them), expected, strict=True):
        assert code == wanted and seen in detail


def test_a_late_step_ends_its_process_and_the_others_are_repeated_in_a_new_one():
    async def beside(pool):
        others = [(await pool.reset(seed, {"fault": "pid"}))[0] for seed in (0, 1)]
        walked = [await pool.step(other, "left") for other in others]
        late, _ = await pool.reset(0, {"fault": "hangs"})
        with pytest.raises(Fault) as caught:
            await pool.step(late, "right")
        after = [await pool.step(other, "left") for other in others]
        return caught.value, walked, after

    fault, walked, after = play(beside, deadline_s=0.3)
    assert fault.code == "env_deadline" and "0.3 s" in fault.detail
    assert [step.state for step in walked] == [step.state for step in after] == ["s0", "s0"]


def test_a_repeated_rollout_that_goes_otherwise_is_lost():
    async def beside(pool):
        other, _ = await pool.reset(0, {"fault": "pid"})
        await pool.step(other, "right")  # it observes the number of its process
        late, _ = await pool.reset(0, {"fault": "hangs"})
        with pytest.raises(Fault):
            await pool.step(late, "right")
        await pool.step(other, "left")

    with pytest.raises(Fault) as caught:
        play(beside, deadline_s=0.3)
    assert caught.value.code == "env_lost" and "step 1 was" in caught.value.detail


def test_a_process_that_dies_once_is_followed_by_equal_steps(tmp_path):
    """The rollouts slip by the process's global random numbers; the process dies after k moves to the left."""

    async def one(pool):
        walks = []
        for k in (0, 1, 3):
            rollout, _ = await pool.reset(7, {"fault": "dies", "once": str(tmp_path / f"{k}")})
            walked = [await pool.step(rollout, "left") for _ in range(k)]
            walks.append(walked + [await pool.step(rollout, "right") for _ in range(6)])
        return walks

    kwargs = {"length": 9, "slip": 0.5}
    dying = play(one, kwargs=kwargs)
    assert len(list(tmp_path.iterdir())) == 3
    assert dying == play(one, kwargs=kwargs) and len({step.state for step in dying[0]}) > 1


def test_a_process_that_is_killed_from_without_loses_no_rollout():
    async def killed(pool):
        rollouts = [(await pool.reset(seed, {}))[0] for seed in (0, 3)]
        before = [await pool.step(rollout, "right") for rollout in rollouts]
        os.kill(pool._slots[0]._child._process.pid, signal.SIGKILL)
        return before + [await pool.step(rollout, "right") for rollout in rollouts]

    assert [step.state for step in play(killed, kwargs={"length": 9})] == ["s1", "s4", "s2", "s5"]


def test_the_environment_of_the_page_is_played_in_a_process(tmp_path, monkeypatch):
    page = Path(__file__).parents[3] / "docs/environments.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert len(block.strip().splitlines()) <= 25
    (tmp_path / "my_corridor.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)

    async def walk(pool):
        rollout, first = await pool.reset(3, {})
        return [first, *[await pool.step(rollout, action) for action in ("left", "right", "right", "right")]]

    steps = play(walk, path="my_corridor.Corridor")
    assert [step.state for step in steps] == ["3", "2", "3", "4", "5"] and steps[-1].success
    assert [step.done for step in steps] == [False] * 4 + [True] and steps[-1].reward == 1


def test_a_reset_is_tried_once_more_in_another_process(tmp_path):
    async def reset(pool, **options):
        return (await pool.reset(0, options | {"at_reset": True}))[1]

    once = str(tmp_path / "tried")
    for kind in ("raises", "hangs", "dies"):
        step = play(lambda pool, kind=kind: reset(pool, fault=kind, once=once + kind), processes=2, start_s=2)
        assert step.state == "s0"


def test_a_set_has_the_same_order_in_every_process():
    async def observe(pool):
        rollouts = [(await pool.reset(0, {"fault": "set"}))[0] for _ in range(2)]
        return {(await pool.step(rollout, "right")).observation for rollout in rollouts}

    assert len(play(observe, processes=2)) == 1


def test_rollouts_beside_each_other_have_random_numbers_of_their_own():
    async def walk(pool, seeds):
        rollouts = [(await pool.reset(seed, {}))[0] for seed in seeds]
        states = [[] for _ in seeds]
        for _ in range(8):
            for rollout, seen in zip(rollouts, states, strict=True):
                seen.append((await pool.step(rollout, "right")).state)
        return states

    kwargs = {"length": 99, "slip": 0.5}
    alone = [play(lambda pool, seed=seed: walk(pool, [seed]), CORRIDOR, kwargs)[0] for seed in (0, 1)]
    assert play(lambda pool: walk(pool, [0, 1]), CORRIDOR, kwargs) == alone
