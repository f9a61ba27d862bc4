"""The interface of turn signals, and the data that they may read of a step: rows, and trajectories as text.

A signal gives every tool turn a reward, or none. Turn modes (`credit/turn/modes/`) turn rewards into advantages. NaN is a
missing reward (a judge that was down): no mode reads it as 0.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch

from verl_credit.errors import IntegrityError
from verl_credit.turns.batch import TurnBatch
from verl_credit.turns.book import as_number, shown
from verl_credit.turns.reward.qa import gold_answers


@dataclass(frozen=True)
class Turn:
    """A response of the policy and the observation after it."""

    text: str
    calls: list[dict] = field(default_factory=list)
    """Executed calls: {"turn", "name", "arguments", "reward"}; reward is None where the tool returned none."""
    observation: str = ""
    """"" for the answer turn."""
    reward: float | None = None
    """The sum of its tools' rewards, or the agent loop's; None: no reward."""


@dataclass(frozen=True)
class Trajectory:
    """A rollout. The last turn is the answer turn, which gets no turn reward."""

    turns: list[Turn]
    golds: list[str]
    stop_reason: str
    outcome: float | None = None
    """The outcome; None in a signal that runs in the agent loop, because the reward is not known there."""
    extra_info: dict = field(default_factory=dict)
    """The row's extra_info (question, index, ...)."""
    scores: dict = field(default_factory=dict)
    """The reward function's other values (em, f1, ...)."""

    @property
    def tool_turns(self) -> list[Turn]:
        """The turns that a signal rewards: all but the last."""
        return self.turns[:-1]


@dataclass(frozen=True)
class Group:
    """The rollouts of one prompt, for a signal that compares them."""

    trajectories: list[Trajectory]


def turn_texts(
    ids: Sequence[int], turn_ids: Sequence[int], n_turns: int, decode: Callable[[list[int]], str]
) -> list[tuple[str, str]]:
    """(the policy's text, the observation after it) per turn; tokens before the first turn are dropped."""
    written: list[list[int]] = [[] for _ in range(n_turns)]
    observed: list[list[int]] = [[] for _ in range(n_turns)]
    current = -1
    for token, turn in zip(ids, turn_ids, strict=False):
        current = turn if turn >= 0 else current
        if current >= 0:
            (written if turn >= 0 else observed)[current].append(token)
    return [(decode(w), decode(o)) for w, o in zip(written, observed, strict=True)]


def make_trajectory(
    texts: Sequence[tuple[str, str]],
    record: dict,
    rewards: Sequence[float | None],
    truth: Any,
    *,
    outcome: float | None = None,
    extra_info: dict | None = None,
    scores: dict | None = None,
) -> Trajectory:
    turns = [
        Turn(
            text,
            [call for call in record.get("calls", []) if call["turn"] == number],
            observation,
            rewards[number] if number < len(rewards) else None,
        )
        for number, (text, observation) in enumerate(texts)
    ]
    return Trajectory(
        turns, gold_answers(truth), record["stop_reason"], outcome, dict(extra_info or {}), dict(scores or {})
    )


@dataclass(frozen=True)
class StepRows:
    """The rows of a step, after outcomes and groups are known."""

    turns: TurnBatch
    decode: Callable[[list[int]], str]
    outcome_B: torch.Tensor
    group_B: torch.Tensor
    gain_B_K: torch.Tensor
    """Information gain (0 where none was measured); NaN: missing."""
    has_gain_B_K: torch.Tensor
    infopo_B: Sequence[Sequence[float]] | None = None
    """The values of each row's tool turns (`turns/infopo.py`); None: not measured."""

    @cached_property
    def n_tool_turns(self) -> list[int]:
        return (self.turns.n_turns_B - 1).clamp(min=0).tolist()

    @property
    def valid_rows(self) -> list[int]:
        return self.turns.row_valid_B.nonzero().flatten().tolist()

    def trajectory(self, row: int) -> Trajectory:
        turns = self.turns
        ids, turn_ids = turns.response_ids[row], turns.turn_ids_B_T[row].tolist()
        return make_trajectory(
            turn_texts(ids, turn_ids, int(turns.n_turns_B[row]), self.decode),
            turns.records[row],
            turns.turn_rewards[row],
            turns.ground_truths[row],
            outcome=float(self.outcome_B[row]),
            extra_info=turns.extra_infos[row],
            scores=turns.scores[row],
        )


class Signal(ABC):
    """A turn signal. The texts ``says``, ``reads`` and ``cost`` are for `explain`."""

    says: ClassVar[str] = ""
    reads: ClassVar[str] = ""
    cost: ClassVar[str] = ""
    columns: tuple[str, ...] = ()
    """The data file's columns that it reads beside `extra_info`."""

    def __init__(self, name: str):
        self.name = name

    @abstractmethod
    def rewards(self, rows: StepRows) -> tuple[torch.Tensor, torch.Tensor]:
        """(reward_B_K, has_reward_B_K); NaN with has_reward True is a missing reward."""

    def why_lost(self, record: dict) -> str:
        """The reason for the missing rewards of the row with this record."""
        return "the signal gave NaN"

    def counts(self, rows: StepRows) -> dict[str, int]:
        """Further counts of a step, by the last part of the metric's name."""
        return {}

    def table(
        self, rows: StepRows, values_of: Callable[[int], Sequence[Any] | None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rewards from one list per valid row: a number, None (no reward) or NaN (missing) for each of its tool turns."""
        reward_B_K = torch.zeros(rows.gain_B_K.shape, dtype=torch.float64)
        has_B_K = torch.zeros(rows.gain_B_K.shape, dtype=torch.bool)
        for row in rows.valid_rows:
            values = self.checked(values_of(row), rows.n_tool_turns[row], f"row {row}")
            for turn, value in enumerate(values):
                if value is not None:
                    reward_B_K[row, turn], has_B_K[row, turn] = value, True
        return reward_B_K, has_B_K

    def checked(self, values: Any, n_tool_turns: int, where: str) -> list[float | None]:
        """Returns a number or None per tool turn. Raises IntegrityError that names signal, row and turn."""
        if isinstance(values, torch.Tensor) or type(values).__module__ == "numpy":
            values = values.tolist()
        if not isinstance(values, list | tuple):
            raise IntegrityError(
                f"turn signal {self.name!r} gave {type(values).__name__} for {where}; expected a list with a number or None "
                f"for each of its {n_tool_turns} tool turns"
            )
        if len(values) != n_tool_turns:
            raise IntegrityError(
                f"turn signal {self.name!r} gave {len(values)} values for {where}, which has {n_tool_turns} tool turns "
                "(the answer turn gets none)"
            )
        return [self._number(value, f"{where}, turn {turn}") for turn, value in enumerate(values)]

    def _number(self, value: Any, where: str) -> float | None:
        if value is None:
            return None
        number = as_number(value)
        if math.isinf(number):
            raise IntegrityError(
                f"turn signal {self.name!r} gave {shown(value)} for {where}; expected a finite number, None (no reward) or "
                "NaN (a missing reward)"
            )
        return number
