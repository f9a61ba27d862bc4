"""The user's signals: a function of a prompt's rollouts, or a coroutine for each trajectory in the agent loop."""

from __future__ import annotations

import asyncio
import inspect
import math
import random
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from verl_credit.config.keys import TurnJudge
from verl_credit.errors import IntegrityError
from verl_credit.redact import SECRET, redact
from verl_credit.turns.book import RowRecord
from verl_credit.turns.search.faults import FAILURES, CircuitBreaker, backoff
from verl_credit.turns.signals.signal import Group, Signal, StepRows, Table, Trajectory

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
            try:
                values = self.call(trajectories)
            except IntegrityError:
                raise
            except Exception as error:
                places, frame = ", ".join(map(str, group)), traceback.extract_tb(error.__traceback__)[-1]
                message = f"{self.message(error)} ({Path(frame.filename).name}, line {frame.lineno})"
                # A traceback with the error as its cause would contain the secrets.
                raise IntegrityError(
                    f"turn signal {self.name!r} raised for rows {places}: {message}"
                ) from None
            values_of.update(zip(group, values, strict=True))
        return self.table(rows, values_of.__getitem__)

    def call(self, trajectories: list[Trajectory]) -> list:
        values = self.function(Group(trajectories), **self.params)
        if not isinstance(values, list | tuple) or len(values) != len(trajectories):
            got = f"{len(values)} lists" if isinstance(values, list | tuple) else type(values).__name__
            raise IntegrityError(
                f"turn signal {self.name!r} returned {got} for a group of {len(trajectories)}; expected a list of "
                "rewards for each trajectory"
            )
        return list(values)


Rewards = list[float | None]


@dataclass
class Line:
    """A worker's state of one judge."""

    breaker: CircuitBreaker
    last: str = ""
    """The reason of the last failure."""
    reported: bool = False


class TrajectorySignal(OwnSignal):
    """``async f(trajectory, **params) -> [reward per tool turn]``, awaited in the agent loop: a judge over HTTP.

    A call that raises, takes too long or returns another form is tried again after a pause. After the last try the
    trajectory's rewards are missing (NaN), and the reason is in its record. No call is made for a trajectory without tool
    turns. After several failed trajectories in a row the next ones get no call for a while (see `CircuitBreaker`).
    """

    reads = "texts, calls, observations, tool rewards, stop reason and gold answers of one rollout"
    cost = "a call of your coroutine per rollout, in the agent loop (algorithm.turn_judge)"

    def rewards(self, rows: StepRows) -> Table:
        def values_of(row: int):
            values = rows.turns.records[row].get("signals", {}).get(self.name)
            if values is None:
                raise IntegrityError(
                    f"turn signal {self.name!r} left no value for row {row}: signals that are coroutines run in the agent "
                    "loops search_agent and turn_agent only"
                )
            return values

        return self.table(rows, values_of)

    def why_lost(self, record: dict) -> str:
        return record.get("signal_errors", {}).get(self.name) or super().why_lost(record)

    def counts(self, rows: StepRows) -> dict[str, int]:
        records, valid = rows.turns.records, rows.turns.valid_rows
        skipped = [row for row in valid if self.name in records[row].get("signals_not_asked", ())]
        return {"not_asked": sum(rows.n_tool_turns[row] for row in skipped)}

    async def ask(
        self, trajectory: Trajectory, judge: TurnJudge, gate: asyncio.Semaphore, line: Line
    ) -> tuple[Rewards, str, bool]:
        """(rewards, why they are missing, whether the coroutine was called).

        A trajectory keeps its place at the gate between its tries, so that the breaker opens early.
        """
        turns = len(trajectory.tool_turns)
        if not turns:
            return [], "", True
        if not line.breaker.refuses:
            async with gate:
                if (ticket := line.breaker.enter()) is not None:
                    report = line.breaker.cancelled
                    try:
                        rewards, reason = await self._tries(trajectory, judge)
                        report = line.breaker.failed if reason else line.breaker.succeeded
                    finally:
                        report(ticket)
                    self._report_down(line, reason)
                    return rewards, reason, True
        return [math.nan] * turns, f"not asked, because it failed too often just now: {line.last}", False

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
                if asyncio.current_task().cancelling():
                    raise  # the rollout itself is cancelled
                reason = self.message(error)  # something inside the coroutine was cancelled
            except Exception as error:
                late = isinstance(error, TimeoutError) and limit.expired()
                reason = f"no answer within {judge.deadline_s:g} s" if late else self.message(error)
        return [math.nan] * turns, reason

    def _report_down(self, line: Line, reason: str) -> None:
        """Print once, each time that the judge goes down, into the worker's output."""
        if not reason:
            line.reported = False
            return
        line.last = reason
        if line.breaker.refuses and not line.reported:
            print(
                f"turn signal {self.name!r} failed for {FAILURES} trajectories in a row, the last time with: {reason}. "
                f"Until it answers again, others lose their rewards at once; one tries after each pause of {PAUSE_S:g} s",
                flush=True,
            )
            line.reported = True


async def ask_signals(
    signals: Iterable[TrajectorySignal], trajectory: Trajectory, judge: TurnJudge, record: RowRecord
) -> None:
    """Call all signals at once, and write their rewards into the record. No call is running when this ends or raises."""
    called, loop = list(signals), asyncio.get_running_loop()
    gate = _gate(loop, judge.concurrency)
    lines = [_line(loop, signal.name) for signal in called]
    answers = await asyncio.gather(
        *(signal.ask(trajectory, judge, gate, line) for signal, line in zip(called, lines, strict=True)),
        return_exceptions=True,
    )
    for signal, answer in zip(called, answers, strict=True):
        if isinstance(answer, BaseException):
            raise answer
        record.signals[signal.name], reason, asked = answer
        if reason:
            record.signal_errors[signal.name] = reason
        if not asked:
            record.signals_not_asked.append(signal.name)


@lru_cache(maxsize=4)
def _gate(loop: asyncio.AbstractEventLoop, concurrency: int) -> asyncio.Semaphore:
    """The gate of all trajectories of a worker, which has one event loop."""
    return asyncio.Semaphore(concurrency)


@lru_cache(maxsize=64)
def _line(loop: asyncio.AbstractEventLoop, name: str) -> Line:
    """The state of a judge for all trajectories of a worker."""
    return Line(CircuitBreaker(FAILURES, PAUSE_S))


def own_signal(name: str, function: Callable, params: dict) -> Signal:
    kind = TrajectorySignal if inspect.iscoroutinefunction(function) else GroupSignal
    return kind(name, function, params)
