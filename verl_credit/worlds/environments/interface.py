"""What an environment is, and what its answers have to be. It needs neither torch nor verl."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Protocol

NO_ACTION = "There is no such action."
"""What the policy reads after a turn that is none of the listed actions; nothing moves."""
LONGEST_NAME = 200  # characters of a state's name; a longer one is replaced by its digest


@dataclass(frozen=True)
class Step:
    """The answer of an environment to ``reset`` and to ``step``."""

    observation: str
    reward: float | None = None
    """None: there is no reward. 0 is a reward."""
    terminated: bool = False
    """The task has ended, well or badly."""
    truncated: bool = False
    """The environment's own limit has ended the rollout."""
    success: bool | None = None
    """None: the environment does not say."""
    valid: bool = True
    """False: the action was not understood, and nothing moved."""
    actions: Sequence[str] = ()
    """What may be done next, where the environment knows."""
    state: str | None = None
    """A name of the state: equal names are equal states."""
    progress: float | None = None
    """How far the task is, from 0 to 1. It may not be made of the outcome."""
    cut: bool = False
    """The observation was longer than `environment.max_chars`; the process sets it."""

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


class Environment(Protocol):
    """The task of one rollout, made by ``Class(**environment.kwargs)``. It is reset once.

    Equal seeds and options begin alike, and equal actions lead alike: a rollout whose process was lost is repeated so.
    """

    def reset(self, seed: int, options: dict) -> Step: ...
    def step(self, action: str) -> Step: ...
    def close(self) -> None: ...


class BadAnswer(Exception):
    """The environment answered against the protocol."""


def checked(answer: Any, max_chars: int) -> Step:
    """Returns the step with plain values, and its observation with ``max_chars`` characters at most. Raises BadAnswer with
    the field and its value."""
    if not isinstance(answer, Step):
        raise BadAnswer(f"the answer is a {type(answer).__name__}; expected a Step")
    plain: dict[str, Any] = {name: _flag(answer, name) for name in ("terminated", "truncated", "valid")}
    plain["success"] = None if answer.success is None else _flag(answer, "success")
    plain["reward"], plain["progress"] = _number(answer, "reward"), _number(answer, "progress")
    if plain["progress"] is not None and not 0 <= plain["progress"] <= 1:
        raise _wrong(answer, "progress", "a number from 0 to 1, or None")
    listed = isinstance(answer.actions, Iterable) and not isinstance(answer.actions, str)
    actions = list(answer.actions) if listed else [None]
    if not all(isinstance(action, str) for action in actions):
        raise _wrong(answer, "actions", "a list of texts")
    plain["actions"] = [_sendable(action) for action in actions]
    if not isinstance(answer.observation, str):
        raise _wrong(answer, "observation", "a text")
    if not isinstance(answer.state, str | None):
        raise _wrong(answer, "state", "a text, or None")
    text, name = _sendable(answer.observation), answer.state
    if name is not None and len(name) > LONGEST_NAME:
        name = blake2b(name.encode("utf-8", "replace"), digest_size=16).hexdigest()
    left_out = len(text) - max_chars
    if left_out > 0:
        half = max_chars // 2
        text = f"{text[:half]}\n[{left_out} characters are left out here]\n{text[len(text) - max_chars + half :]}"
    return replace(answer, **plain, observation=text, state=name and _sendable(name), cut=left_out > 0)


def _sendable(text: str) -> str:
    """The text without lone surrogates, which no queue can send."""
    return text.encode("utf-8", "replace").decode()


def _flag(answer: Step, name: str) -> bool:
    value = getattr(answer, name)
    if type(value).__name__ not in ("bool", "bool_"):  # numpy's, too
        raise _wrong(answer, name, "True or False")
    return bool(value)


def _number(answer: Step, name: str) -> float | None:
    value = getattr(answer, name)
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise _wrong(answer, name, "a finite number, or None")
    return number


def _wrong(answer: Step, name: str, expected: str) -> BadAnswer:
    try:
        shown = f"{getattr(answer, name)!r:.80}"
    except Exception:  # a value may raise anything when it is printed
        shown = "a value that cannot be printed"
    return BadAnswer(f"{name} is {shown}; expected {expected}")


def shown_step(step: Step, list_actions: bool) -> str:
    """What the policy reads of the step: its observation, and the actions that may follow."""
    text = step.observation
    return f"{text}\nActions: {', '.join(step.actions)}" if list_actions and step.actions else text
