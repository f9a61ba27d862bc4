"""The user's signals: a function of a prompt's rollouts, or a coroutine for each trajectory in the agent loop."""

from __future__ import annotations

import asyncio
import inspect
import math
import random
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from verl_credit.config.keys import TurnJudge
from verl_credit.errors import IntegrityError
from verl_credit.redact import SECRET, redact
from verl_credit.turns.rollout.book import RowRecord
from verl_credit.turns.rollout.search.faults import FAILURES, CircuitBreaker, backoff
from verl_credit.turns.step.signals.signal import Group, Signal, StepRows, Table, Trajectory, blamed, listed

_JITTER = random.Random()
PAUSE_S = 2.0
"""Seconds without calls after FAILURES trajectories in a row that failed."""


class OwnSignal(Signal):
    """A user's function and its params."""

    def __init__(self, name: str, function: Callable, params: dict):
        super().__init__(name)
        self.function, self.params = function, params
        self.wants = frozenset(getattr(function, "reads", ()))
        """What it declares to need of a rollout and may lack: "pages"."""
        self.outputs = getattr(function, "outputs", self.outputs)

    def message(self, error: BaseException) -> str:
        """The error in one line, without addresses' passwords and the values of params that are secrets."""
        text = redact(_one_line(f"{type(error).__name__}: {error}"))
        for secret in sorted({*map(_one_line, _secrets(self.params))} - {""}, key=len, reverse=True):
            text = text.replace(secret, "***")
        return text[:300]


def _one_line(value: Any) -> str:
    return " ".join(str(value).split())


def _secrets(value: Any, hidden: bool = False) -> Iterator[Any]:
    """The values below a key whose name marks a secret."""
    if isinstance(value, dict):
        for name, one in value.items():
            yield from _secrets(one, hidden or bool(SECRET.search(str(name))))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _secrets(one, hidden)
    elif hidden and value is not None:
        yield value


class GroupSignal(OwnSignal):
    """``f(group, **params) -> [[reward per tool turn] per trajectory]``, called by the trainer for every prompt."""

    reads = "texts, calls, observations, tool rewards, stop reasons, outcomes and gold answers of a question's rollouts"
    cost = "a call of your function per question, in the trainer"

    def rewards(self, rows: StepRows) -> Table:
        members: dict[int, list[int]] = {}
        for row in rows.turns.valid_rows:
            members.setdefault(int(rows.group_B[row]), []).append(row)
        values_of: dict[int, Any] = {}
        for group in members.values():
            trajectories = [rows.trajectory(row) for row in group]
            with blamed(
                f"turn signal {self.name!r} raised for rows {', '.join(map(str, group))}", self._placed
            ):
                values = self.call(trajectories)
            values_of.update(zip(group, values, strict=True))
        return self.table(rows, values_of.__getitem__)

    def call(self, trajectories: list[Trajectory]) -> list:
        values, n = self.function(Group(trajectories), **self.params), len(trajectories)
        said = f"turn signal {self.name!r} returned"
        return listed(values, n, said, f" for a group of {n}", "rewards for each trajectory")

    def _placed(self, error: Exception) -> str:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"{self.message(error)} ({Path(frame.filename).name}, line {frame.lineno})"


Rewards = list[float | None]


class TrajectorySignal(OwnSignal):
    """``async f(trajectory, **params) -> [reward per tool turn]``, awaited in the agent loop: a judge over HTTP.

    A call that raises, takes too long or returns another form is tried again after a pause. After the last try the
    trajectory's rewards are missing (NaN), and the reason is in its record. After FAILURES failed trajectories in a row the
    next ones get no call for PAUSE_S seconds (see `CircuitBreaker`).
    """

    reads = "texts, calls, observations, tool rewards, stop reason and gold answers of one rollout"
    cost = "a call of your coroutine per rollout, in the agent loop (algorithm.turn_judge)"

    def __init__(self, name: str, function: Callable, params: dict):
        super().__init__(name, function, params)
        self._breaker = CircuitBreaker(FAILURES, PAUSE_S)
        self._failure = ""  # the reason of the last one
        self._reported = False

    def rewards(self, rows: StepRows) -> Table:
        def values_of(row: int) -> Any:
            values = rows.turns.records[row]["signals"].get(self.name)
            if values is None:
                raise IntegrityError(
                    f"turn signal {self.name!r} left no value for row {row}: signals that are coroutines run in the agent "
                    "loops search_agent and turn_agent only"
                )
            return values

        return self.table(rows, values_of)

    def why_lost(self, record: dict) -> str:
        return record["signal_errors"].get(self.name) or super().why_lost(record)

    def counts(self, rows: StepRows) -> dict[str, int]:
        records, valid = rows.turns.records, rows.turns.valid_rows
        skipped = [row for row in valid if self.name in records[row]["signals_not_asked"]]
        return {"not_asked": sum(rows.n_tool_turns[row] for row in skipped)}

    async def ask(
        self, trajectory: Trajectory, judge: TurnJudge, gate: asyncio.Semaphore
    ) -> tuple[Rewards, str, bool]:
        """(rewards, why they are missing, whether the coroutine was called).

        A trajectory keeps its place at the gate between its tries, so that the breaker opens early.
        """
        breaker, turns = self._breaker, len(trajectory.tool_turns)
        if not turns:
            return [], "", True
        if not breaker.refuses:
            async with gate:
                if (ticket := breaker.enter()) is not None:
                    report = breaker.cancelled
                    try:
                        rewards, reason = await self._tries(trajectory, judge)
                        report = breaker.failed if reason else breaker.succeeded
                    finally:
                        report(ticket)
                    self._report_down(reason)
                    return rewards, reason, True
        return [math.nan] * turns, f"not asked, because it failed too often just now: {self._failure}", False

    async def _tries(self, trajectory: Trajectory, judge: TurnJudge) -> tuple[Rewards, str]:
        turns, reason = len(trajectory.tool_turns), ""
        index = trajectory.extra_info.get("index")
        where = "a trajectory" if index is None else f"a trajectory of the row with index {index}"
        for attempt in range(judge.retries + 1):
            if attempt:
                await asyncio.sleep(backoff(attempt - 1, _JITTER))
            limit = asyncio.timeout(judge.deadline_s)
            try:
                async with limit:
                    values = await self.function(trajectory, **self.params)
                return self.checked(values, turns, where), ""
            except asyncio.CancelledError as error:
                if (rollout := asyncio.current_task()) and rollout.cancelling():
                    raise
                reason = self.message(error)  # something inside the coroutine was cancelled
            except Exception as error:
                late = isinstance(error, TimeoutError) and limit.expired()
                reason = f"no answer within {judge.deadline_s:g} s" if late else self.message(error)
        return [math.nan] * turns, reason

    def _report_down(self, reason: str) -> None:
        """Print once, each time that the judge goes down, into the worker's output."""
        if not reason:
            self._reported = False
            return
        self._failure = reason
        if self._breaker.refuses and not self._reported:
            print(
                f"turn signal {self.name!r} failed for {FAILURES} trajectories in a row, the last time with: {reason}. "
                f"Until it answers, others lose their rewards at once; one tries after each pause of {PAUSE_S:g} s",
                flush=True,
            )
            self._reported = True


async def ask_signals(
    signals: Iterable[TrajectorySignal], trajectory: Trajectory, judge: TurnJudge, record: RowRecord
) -> None:
    """Call all signals at once, and write their rewards into the record. No call is running when this ends or raises."""
    called, gate = list(signals), _gate(asyncio.get_running_loop(), judge.concurrency)
    asked = (signal.ask(trajectory, judge, gate) for signal in called)
    answers = await asyncio.gather(*asked, return_exceptions=True)
    for signal, answer in zip(called, answers, strict=True):
        if isinstance(answer, BaseException):
            raise answer
        record.signals[signal.name], reason, was_called = answer
        if reason:
            record.signal_errors[signal.name] = reason
        if not was_called:
            record.signals_not_asked.append(signal.name)


@lru_cache(maxsize=4)
def _gate(loop: asyncio.AbstractEventLoop, concurrency: int) -> asyncio.Semaphore:
    """The gate of all trajectories of a worker, which has one event loop."""
    return asyncio.Semaphore(concurrency)


def own_signal(name: str, function: Callable, params: dict) -> Signal:
    kind = TrajectorySignal if inspect.iscoroutinefunction(function) else GroupSignal
    return kind(name, function, params)
