"""A judge that is down costs its deadlines for the first trajectories only: then rewards are lost at once."""

import asyncio
import math
from functools import partial

import pytest

from kit.signal_step import rewards, step_of
from kit.turn_rows import Row
from verl_credit.config.keys import TurnJudge
from verl_credit.errors import IntegrityError
from verl_credit.turns.rollout.book import RowRecord
from verl_credit.turns.rollout.search.faults import CircuitBreaker
from verl_credit.turns.step.signals import own
from verl_credit.turns.step.signals.own import ask_signals, own_signal
from verl_credit.turns.step.signals.signal import Trajectory, Turn

ONE = Trajectory([Turn("ask", [], "page"), Turn("done")], ["Paris"], "answer")
SKIPPED = "not asked, because it failed too often just now: ConnectionError: refused"
OPENED = "turn signal 'my.judge' failed for 3 trajectories in a row, the last time with: ConnectionError: refused. Until"


class World:
    """A judge, the seconds of its breaker's clock, and whether the judge is up."""

    now, up, hangs, calls = 100.0, False, False, 0

    def __init__(self):
        self.signal = own_signal("my.judge", self.judge, {})

    async def judge(self, trajectory):
        self.calls += 1
        await (asyncio.Event().wait() if self.hangs else asyncio.sleep(0))
        if not self.up:
            raise ConnectionError("refused")
        return [0.5]

    async def ask(self, **changes) -> RowRecord:
        record, given = RowRecord(), {"retries": 0} | changes
        await ask_signals([self.signal], ONE, TurnJudge(**given), record)
        return record

    async def asked(self, **changes) -> bool:
        before = self.calls
        record = await self.ask(**changes)
        (value,) = record.signals["my.judge"]
        assert math.isnan(value) if record.signal_errors else value == 0.5
        assert record.signals_not_asked == ([] if self.calls > before else ["my.judge"])
        return self.calls > before


@pytest.fixture
def world(monkeypatch):
    monkeypatch.setattr(own, "CircuitBreaker", partial(CircuitBreaker, clock=lambda: world.now))
    monkeypatch.setattr(own, "FAILURES", 3)
    monkeypatch.setattr(own, "PAUSE_S", 30.0)
    return (world := World())


def test_after_failures_in_a_row_rewards_are_lost_at_once_and_one_trajectory_tries_again(world, capsys):
    async def run():
        assert [await world.asked(retries=1) for _ in range(6)] == [True] * 3 + [False] * 3
        assert world.calls == 3 * 2  # each with its retry
        assert (await world.ask(retries=1)).signal_errors == {"my.judge": SKIPPED}
        world.now += 29.9
        assert not await world.asked(retries=1)
        world.now += 0.1
        assert [await world.asked(retries=1) for _ in range(3)] == [True, False, False]
        assert capsys.readouterr().out.count(OPENED) == 1
        world.now, world.up = world.now + 30, True
        assert [await world.asked(retries=1) for _ in range(3)] == [True] * 3
        world.up = False  # the count begins anew, and so does what is said
        assert [await world.asked(retries=1) for _ in range(4)] == [True] * 3 + [False]
        assert capsys.readouterr().out.count(OPENED) == 1

    asyncio.run(run())


def test_of_many_waiting_trajectories_only_the_first_ones_ask(world):
    """Those that run at one time count once, so that at most concurrency times FAILURES ask."""

    async def run():
        records = await asyncio.gather(*(world.ask(concurrency=4) for _ in range(64)))
        assert all(math.isnan(record.signals["my.judge"][0]) for record in records)
        assert 3 <= world.calls <= 12
        skipped = [record for record in records if record.signals_not_asked]
        assert len(skipped) == 64 - world.calls
        assert {record.signal_errors["my.judge"] for record in skipped} == {SKIPPED}

    asyncio.run(run())


def test_while_one_tries_again_no_other_waits_for_it(world):
    async def run():
        for _ in range(3):
            await world.ask()
        world.now, world.hangs = world.now + 30, True
        probe = asyncio.create_task(world.ask(concurrency=1))
        while world.calls == 3:
            await asyncio.sleep(0)
        assert not await world.asked(concurrency=1)
        probe.cancel()
        with pytest.raises(asyncio.CancelledError):
            await probe
        world.hangs = False
        assert await world.asked()  # a probe that is given up leaves its place to the next

    asyncio.run(run())


def test_one_judge_that_is_down_stops_no_other(world):
    async def fine(trajectory):
        return [1.0]

    async def run():
        both = [world.signal, own_signal("my.other", fine, {})]
        for _ in range(5):
            record = RowRecord()
            await ask_signals(both, ONE, TurnJudge(retries=0), record)
        assert record.signals_not_asked == ["my.judge"] and record.signals["my.other"] == [1.0]

    asyncio.run(run())


def test_rewards_that_were_not_asked_for_are_lost_counted_and_stop_the_run(world):
    skipped = RowRecord(
        signals={"my.judge": [math.nan]}, signal_errors={"my.judge": SKIPPED}, signals_not_asked=["my.judge"]
    )
    given = RowRecord(signals={"my.judge": [0.5]})
    rows = step_of(*[Row(("ask", "page", "done"), record=record) for record in (given, skipped, skipped)])
    signals, name = {own_signal("my.judge", world.judge, {}): 1.0}, "credit/signal/my.judge"
    *_, metrics = rewards(signals, rows, 0.7)
    assert [metrics[f"{name}/{of}"] for of in ("turns", "without", "lost", "not_asked")] == [3, 0, 2, 2]
    *_, metrics = rewards(signals, step_of(Row(("ask", "page", "done"), record=given)))
    assert metrics[f"{name}/not_asked"] == 0
    with pytest.raises(IntegrityError, match="lost 2 of 3 rewards .not asked, because it failed too often"):
        rewards(signals, rows, 0.25)
