"""Environments in processes of their own: a deadline that can be kept, random numbers for each, and crashes that stay there.

The rollouts of a pool are dealt round its processes. A process answers one request at a time, from a thread here. When it is
ended or dies, the other rollouts that it held are repeated in a new one, from their seeds and actions.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from select import POLLIN, poll
from time import monotonic
from typing import Any

from verl_credit.worlds.environments.interface import Step


class Fault(Exception):
    """``code`` is one of `turns.rollout.reward.env_record.FAULTS`; ``detail``: what was seen of it."""

    def __init__(self, code: str, detail: str):
        super().__init__(f"{code}: {detail}")
        self.code, self.detail = code, detail


class Died(Exception):
    """The process ended before it answered."""


class Child:
    """One process of environments, which is ended where it is late."""

    def __init__(self, max_chars: int):
        command = [sys.executable, "-m", "verl_credit.worlds.environments.process", str(max_chars)]
        # Not multiprocessing's spawn, which imports the caller's main module with all of verl.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        variables = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1"}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=variables)
        self._ready, self._read = poll(), b""
        self._ready.register(self._process.stdout, POLLIN)
        self.started = self.ended = False
        """``started``: it has answered once, so that the environment's package is imported."""

    def ask(self, request: tuple, seconds: float) -> dict:
        """Returns the answer. Raises TimeoutError, and Died; the process has ended then."""
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            answer = json.loads(self._line(seconds))
        except TimeoutError:
            self.end()
            raise
        except (OSError, EOFError, ValueError) as error:
            self.end()
            raise Died(
                f"the process of the environment ended (exit code {self._process.returncode})"
            ) from error
        self.started = True
        return answer

    def _line(self, seconds: float) -> bytes:
        until = monotonic() + seconds
        while b"\n" not in self._read:
            if not self._ready.poll(max(until - monotonic(), 0) * 1000):
                raise TimeoutError(f"there was no answer in {seconds:g} s")
            if not (more := os.read(self._process.stdout.fileno(), 1 << 16)):
                raise EOFError
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        return line

    def end(self) -> None:
        self.ended = True
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # a request that was not written
                stream.close()


@dataclass
class Rollout:
    """An environment that is open, with what repeats it."""

    number: int
    slot: Slot
    begin: tuple
    """The request that resets it."""
    child: Child | None = None
    """The process that holds it."""
    actions: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


class Slot:
    """The place of one process, and the thread that asks it; the other methods run in that thread."""

    def __init__(self, max_chars: int, deadline_s: float, start_s: float):
        self._max_chars, self._deadline_s, self._start_s = max_chars, deadline_s, start_s
        self._thread, self._child = ThreadPoolExecutor(1), None

    async def do(self, method: Callable, *given: Any) -> Any:
        return await asyncio.wrap_future(self._thread.submit(method, *given))

    def reset(self, rollout: Rollout) -> Step:
        rollout.steps = [self._tried_twice(rollout, rollout.begin)]
        return rollout.steps[0]

    def step(self, rollout: Rollout, action: str) -> Step:
        step = self._tried_twice(rollout, (rollout.number, "step", action))
        rollout.actions.append(action)
        rollout.steps.append(step)
        return step

    def close(self, rollout: Rollout) -> None:
        if rollout.child is self._child and self._child is not None and not self._child.ended:
            with suppress(TimeoutError, Died):  # the other rollouts there are repeated when they go on
                self._child.ask((rollout.number, "close"), self._deadline_s)

    def end(self) -> None:
        if self._child is not None:
            self._child.end()
        self._thread.shutdown(wait=False)

    def _tried_twice(self, rollout: Rollout, request: tuple) -> Step:
        """Raises Fault. A request at which the process dies is made once more in a new one."""
        try:
            return self._asked(rollout, request)
        except Died:
            try:
                return self._asked(rollout, request)
            except Died as died:
                raise Fault("env_lost", f"{died}, twice at one request") from died

    def _asked(self, rollout: Rollout, request: tuple) -> Step:
        if self._child is None or self._child.ended:
            self._child = Child(self._max_chars)
        if rollout.steps and rollout.child is not self._child:
            self._repeat(rollout)
        rollout.child = self._child
        return self._answer(request)

    def _repeat(self, rollout: Rollout) -> None:
        """Brings the rollout back in a new process. Raises Fault, and Died."""
        again = [(rollout.number, "step", action) for action in rollout.actions]
        for turn, (request, step) in enumerate(zip([rollout.begin, *again], rollout.steps, strict=True)):
            try:
                found = self._answer(request)
            except Fault as fault:
                raise Fault(
                    "env_lost", f"its process ended, and step {turn} failed again: {fault}"
                ) from fault
            if found != step:
                why = f"step {turn} was {found.observation!r:.80} when it was repeated, before {step.observation!r:.80}"
                raise Fault("env_lost", f"its process ended, and {why}")

    def _answer(self, request: tuple) -> Step:
        seconds = self._deadline_s if self._child.started else self._start_s
        try:
            answer = self._child.ask(request, seconds)
        except TimeoutError as late:
            raise Fault("env_deadline", f"{request[1]}: {late}") from late
        if "fault" in answer:
            raise Fault(answer["fault"], answer["detail"])
        return Step(**answer["step"])


class Pool:
    """The processes of a worker, which start when they are first needed."""

    def __init__(
        self,
        path: str,
        kwargs: Mapping[str, Any],
        *,
        processes: int = 2,
        deadline_s: float = 20.0,
        start_s: float = 120.0,
        max_chars: int = 4000,
    ):
        self._made = path, dict(kwargs)
        self._slots = [Slot(max_chars, deadline_s, start_s) for _ in range(processes)]
        self._number = count()

    async def reset(self, seed: int, options: Mapping[str, Any]) -> tuple[Rollout, Step]:
        """Opens an environment. A reset that fails is tried once more, if possible in another process. Raises Fault."""
        number = next(self._number)
        for attempt in (0, 1):
            slot = self._slots[(number + attempt) % len(self._slots)]
            rollout = Rollout(number, slot, (number, "reset", *self._made, seed, dict(options)))
            try:
                return rollout, await slot.do(slot.reset, rollout)
            except Fault:
                if attempt:
                    raise
        raise AssertionError

    async def step(self, rollout: Rollout, action: str) -> Step:
        """Raises Fault."""
        return await rollout.slot.do(rollout.slot.step, rollout, action)

    async def close(self, rollout: Rollout) -> None:
        await rollout.slot.do(rollout.slot.close, rollout)

    async def end(self) -> None:
        """Ends the processes, each after the request that it is at."""
        for slot in self._slots:
            await slot.do(slot.end)
