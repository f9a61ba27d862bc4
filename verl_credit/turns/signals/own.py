"""Signals of one's own: a function of a prompt's rollouts, or a coroutine for each trajectory in the agent loop."""

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

import torch

from verl_credit.config.keys import TurnJudge
from verl_credit.errors import IntegrityError
from verl_credit.search.faults import backoff
from verl_credit.search.redact import SECRET, redact
from verl_credit.turns.book import RowRecord
from verl_credit.turns.signals.signal import Signal, StepRows
from verl_credit.turns.signals.trajectory import Group, Trajectory

_JITTER = random.Random()


class OwnSignal(Signal):
    """A function of the user's and its params."""

    def __init__(self, name: str, function: Callable, params: dict):
        super().__init__(name)
        self.function, self.params = function, params

    def said(self, error: BaseException) -> str:
        """The error in one line, without addresses' passwords and the values of params that are secrets."""
        text = redact(_one_line(f"{type(error).__name__}: {error}"))
        for secret in sorted({*map(_one_line, _secrets(self.params))} - {""}, key=len, reverse=True):
            text = text.replace(secret, "***")
        return text[:300]


def _one_line(value: Any) -> str:
    return " ".join(str(value).split())


def _secrets(value: Any, hidden: bool = False) -> Iterator[Any]:
    """The values below a key whose name says that it is a secret."""
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

    def rewards(self, rows: StepRows) -> tuple[torch.Tensor, torch.Tensor]:
        members: dict[int, list[int]] = {}
        for row in rows.valid_rows:
            members.setdefault(int(rows.group_B[row]), []).append(row)
        found: dict[int, Any] = {}
        for group in members.values():
            trajectories = [rows.trajectory(row) for row in group]
            try:
                values = self.call(trajectories)
            except IntegrityError:
                raise
            except Exception as error:
                places, frame = ", ".join(map(str, group)), traceback.extract_tb(error.__traceback__)[-1]
                said = f"{self.said(error)} ({Path(frame.filename).name}, line {frame.lineno})"
                # The error itself, shown as the cause, would show its secrets.
                raise IntegrityError(f"turn signal {self.name!r} raised for rows {places}: {said}") from None
            found.update(zip(group, values, strict=True))
        return self.table(rows, found.__getitem__)

    def call(self, trajectories: list[Trajectory]) -> list:
        values = self.function(Group(trajectories), **self.params)
        if not isinstance(values, list | tuple) or len(values) != len(trajectories):
            got = f"{len(values)} lists" if isinstance(values, list | tuple) else type(values).__name__
            raise IntegrityError(
                f"turn signal {self.name!r} returned {got} for a group of {len(trajectories)}; expected a list of "
                "rewards for each trajectory"
            )
        return list(values)


class TrajectorySignal(OwnSignal):
    """``async f(trajectory, **params) -> [reward per tool turn]``, awaited in the agent loop: a judge over HTTP.

    A call that raises, takes too long or answers in another form is tried again after a pause. After the last try the
    trajectory's rewards are lost (NaN), and the reason is in its record. A trajectory without tool turns is not asked after.
    """

    reads = "texts, calls, observations, tool rewards, stop reason and gold answers of one rollout"
    cost = "a call of your coroutine per rollout, in the agent loop (algorithm.turn_judge)"

    def rewards(self, rows: StepRows) -> tuple[torch.Tensor, torch.Tensor]:
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

    async def ask(
        self, trajectory: Trajectory, judge: TurnJudge, gate: asyncio.Semaphore
    ) -> tuple[list[float | None], str]:
        """(rewards, why they were lost or "")."""
        turns, reason = len(trajectory.tool_turns), ""
        if not turns:
            return [], ""
        index = trajectory.extra_info.get("index")
        where = "a trajectory" if index is None else f"a trajectory of the row with index {index}"
        for attempt in range(judge.retries + 1):
            if attempt:
                await asyncio.sleep(backoff(attempt - 1, _JITTER))
            limit = asyncio.timeout(judge.deadline_s)
            try:
                async with gate, limit:
                    values = await self.function(trajectory, **self.params)
                return self.checked(values, turns, where), ""
            except asyncio.CancelledError as error:
                if asyncio.current_task().cancelling():
                    raise  # the rollout itself is given up
                reason = self.said(error)  # of something inside the coroutine
            except Exception as error:
                late = isinstance(error, TimeoutError) and limit.expired()
                reason = f"no answer within {judge.deadline_s:g} s" if late else self.said(error)
        return [math.nan] * turns, reason


async def ask_signals(
    signals: Iterable[TrajectorySignal], trajectory: Trajectory, judge: TurnJudge, record: RowRecord
) -> None:
    """Ask all of them at once, and write what they say into the record. None is still running when this ends or raises."""
    asked = list(signals)
    gate = _gate(asyncio.get_running_loop(), judge.concurrency)
    answers = await asyncio.gather(
        *(signal.ask(trajectory, judge, gate) for signal in asked), return_exceptions=True
    )
    for signal, answer in zip(asked, answers, strict=True):
        if isinstance(answer, BaseException):
            raise answer
        record.signals[signal.name], reason = answer
        if reason:
            record.signal_errors[signal.name] = reason


@lru_cache(maxsize=4)
def _gate(loop: asyncio.AbstractEventLoop, concurrency: int) -> asyncio.Semaphore:
    """One for all trajectories of a worker, whose event loop is one."""
    return asyncio.Semaphore(concurrency)


def own_signal(name: str, function: Callable, params: dict) -> Signal:
    kind = TrajectorySignal if inspect.iscoroutinefunction(function) else GroupSignal
    return kind(name, function, params)
