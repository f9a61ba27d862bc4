"""Signals of one's own: a function of a prompt's rollouts, or a coroutine for each trajectory in the agent loop."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch

from verl_credit.config.keys import TurnJudge
from verl_credit.errors import IntegrityError
from verl_credit.search.redact import redact
from verl_credit.turns.book import RowRecord
from verl_credit.turns.signals.signal import Signal, StepRows
from verl_credit.turns.signals.trajectory import Group, Trajectory


class GroupSignal(Signal):
    """``f(group, **params) -> [[reward per tool turn] per trajectory]``, called by the trainer for every prompt."""

    reads = "texts, calls, observations, tool rewards, stop reasons, outcomes and gold answers of a question's rollouts"
    cost = "a call of your function per question, in the trainer"

    def __init__(self, name: str, function: Callable, params: dict):
        super().__init__(name)
        self.function, self.params = function, params

    def rewards(self, rows: StepRows) -> tuple[torch.Tensor, torch.Tensor]:
        members: dict[int, list[int]] = {}
        for row in rows.valid_rows:
            members.setdefault(int(rows.group_B[row]), []).append(row)
        found: dict[int, Any] = {}
        for group in members.values():
            found.update(zip(group, self.call([rows.trajectory(row) for row in group]), strict=True))
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


class TrajectorySignal(Signal):
    """``async f(trajectory, **params) -> [reward per tool turn]``, awaited in the agent loop: a judge over HTTP.

    A call that raises or takes too long is tried again; after the last try the trajectory's rewards are lost (NaN), and the
    reason is in its record.
    """

    reads = "texts, calls, observations, tool rewards, stop reason and gold answers of one rollout"
    cost = "a call of your coroutine per rollout, in the agent loop (algorithm.turn_judge)"

    def __init__(self, name: str, function: Callable, params: dict):
        super().__init__(name)
        self.function, self.params = function, params

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

    async def ask(
        self, trajectory: Trajectory, judge: TurnJudge, gate: asyncio.Semaphore
    ) -> tuple[list[float | None], str]:
        """(rewards, why they were lost or "")."""
        turns, reason = len(trajectory.tool_turns), ""
        for _ in range(judge.retries + 1):
            try:
                async with gate, asyncio.timeout(judge.deadline_s):
                    values = await self.function(trajectory, **self.params)
                return self.checked(values, turns, "a trajectory"), ""
            except IntegrityError:
                raise  # a wrong answer is not a fault of the network
            except TimeoutError:
                reason = f"no answer within {judge.deadline_s:g} s"
            except Exception as error:
                reason = redact(" ".join(f"{type(error).__name__}: {error}".split()))[:300]
        return [math.nan] * turns, reason


async def ask_signals(
    signals: Iterable[Signal], trajectory: Trajectory, judge: TurnJudge, record: RowRecord
) -> None:
    """Ask every coroutine among the signals at once, and write what they say into the record."""
    asked = [signal for signal in signals if isinstance(signal, TrajectorySignal)]
    gate = _gate(judge.concurrency)
    answers = await asyncio.gather(*(signal.ask(trajectory, judge, gate) for signal in asked))
    for signal, (values, reason) in zip(asked, answers, strict=True):
        record.signals[signal.name] = values
        if reason:
            record.signal_errors[signal.name] = reason


@lru_cache(maxsize=4)
def _gate(concurrency: int) -> asyncio.Semaphore:
    """One for all trajectories of a process."""
    return asyncio.Semaphore(concurrency)


def own_signal(name: str, function: Callable, params: dict) -> Signal:
    kind = TrajectorySignal if inspect.iscoroutinefunction(function) else GroupSignal
    return kind(name, function, params)
