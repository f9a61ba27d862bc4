"""The interface of turn signals, the data that they may read of a step, and the turn rewards of a step.

A signal gives every tool turn a reward, or none. Turn modes (`credit/turn/modes/`) turn rewards into advantages. NaN is a
missing reward (a judge that was down): no mode reads it as 0.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from verl_credit.config.settings import INFO_GAIN, CreditSettings
from verl_credit.credit.groups import z_score
from verl_credit.credit.operator import SUB_AGENTS
from verl_credit.errors import IntegrityError
from verl_credit.lazy import torch
from verl_credit.turns.rollout.book import TurnBatch, as_number, shown
from verl_credit.turns.rollout.reward.env_record import golds_of


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
    pages: list[str] | None = None
    """The ids of the pages that its searches returned; None: it made no search that the agent loop recorded."""


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
    ground_truth: Any = None
    """The row's gold answers as the data file has them, with the form that the row requests."""

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
    parts: list[tuple[list[int], list[int]]] = [([], []) for _ in range(n_turns)]
    current = -1
    for token, turn in zip(ids, turn_ids, strict=False):
        current = turn if turn >= 0 else current
        if current >= 0:
            parts[current][turn < 0].append(token)
    return [(decode(written), decode(observed)) for written, observed in parts]


def make_trajectory(
    texts: Sequence[tuple[str, str]], record: dict, rewards: Sequence[float | None], truth: Any, **more: Any
) -> Trajectory:
    """``record``: a `RowRecord` as a dict. ``more``: fields of the trajectory that the record lacks."""
    pages: dict[int, list[str]] = {}
    for search in record["searches"]:
        pages.setdefault(search["turn"], []).extend(search["pages"])
    turns = [
        Turn(
            text,
            [call for call in record["calls"] if call["turn"] == number],
            observation,
            rewards[number] if number < len(rewards) else None,
            pages.get(number),
        )
        for number, (text, observation) in enumerate(texts)
    ]
    return Trajectory(turns, golds_of(record, truth), record["stop_reason"], ground_truth=truth, **more)


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

    @cached_property
    def n_tool_turns(self) -> list[int]:
        return (self.turns.n_turns_B - 1).clamp(min=0).tolist()

    def trajectory(self, row: int) -> Trajectory:
        turns = self.turns
        ids, turn_ids = turns.response_ids[row], turns.turn_ids_B_T[row].tolist()
        return make_trajectory(
            turn_texts(ids, turn_ids, int(turns.n_turns_B[row]), self.decode),
            turns.records[row],
            turns.turn_rewards[row],
            turns.ground_truths[row],
            outcome=float(self.outcome_B[row]),
            extra_info=dict(turns.extra_infos[row]),
            scores=dict(turns.scores[row]),
        )


def listed(values: Any, n: int, said: str, where: str, expected: str) -> list:
    """The ``n`` entries of what a user's function returned. Raises IntegrityError."""
    if isinstance(values, list | tuple) and len(values) == n:
        return list(values)
    got = f"{len(values)} values" if isinstance(values, list | tuple) else type(values).__name__
    raise IntegrityError(f"{said} {got}{where}; expected a list with {expected}")


@contextmanager
def blamed(said: str, message: Callable[[Exception], str] | None = None) -> Iterator[None]:
    """Raises IntegrityError where a user's function raises. ``message``: the error's text, by default all of it; the
    traceback may show more, and goes where a text is made."""
    try:
        yield
    except IntegrityError:
        raise
    except Exception as error:
        text = message(error) if message else " ".join(f"{type(error).__name__}: {error}".split())
        raise IntegrityError(f"{said}: {text}") from (None if message else error)


Table = tuple["torch.Tensor", "torch.Tensor"]
"""(reward_B_K, has_reward_B_K)"""


class Signal(ABC):
    """A turn signal. The texts ``says``, ``reads`` and ``cost`` are for `explain`."""

    says: ClassVar[str] = ""
    reads: ClassVar[str] = ""
    cost: ClassVar[str] = ""
    outputs: str = SUB_AGENTS
    """The rollouts of several outputs that it has a meaning for (`credit.operator.OUTPUTS`)."""
    columns: tuple[str, ...] = ()
    """The data file's columns that it reads beside `extra_info`."""

    def __init__(self, name: str):
        self.name = name

    @abstractmethod
    def rewards(self, rows: StepRows) -> Table:
        """(reward_B_K, has_reward_B_K); NaN with has_reward True is a missing reward."""

    def why_lost(self, record: dict) -> str:
        """The reason for the missing rewards of the row with this record."""
        return "the signal gave NaN"

    def counts(self, rows: StepRows) -> dict[str, int]:
        """Further counts of a step, by the last part of the metric's name."""
        return {}

    def table(self, rows: StepRows, values_of: Callable[[int], Any]) -> Table:
        """Rewards from one list per valid row: a number, None (no reward) or NaN (missing) for each of its tool turns."""
        reward_B_K = torch.zeros(rows.gain_B_K.shape, dtype=torch.float64)
        has_B_K = torch.zeros(rows.gain_B_K.shape, dtype=torch.bool)
        for row in rows.turns.valid_rows:
            values = self.checked(values_of(row), rows.n_tool_turns[row], f"row {row}")
            for turn, value in enumerate(values):
                if value is not None:
                    reward_B_K[row, turn], has_B_K[row, turn] = value, True
        return reward_B_K, has_B_K

    def checked(self, values: Any, n_tool_turns: int, where: str) -> list[float | None]:
        """Returns a number or None per tool turn. Raises IntegrityError that names signal, row and turn."""
        if isinstance(values, torch.Tensor) or type(values).__module__ == "numpy":
            values = values.tolist()
        expected = f"a number or None for each of its {n_tool_turns} tool turns (the answer turn gets none)"
        values = listed(values, n_tool_turns, f"turn signal {self.name!r} gave", f" for {where}", expected)
        numbers = [None if value is None else as_number(value) for value in values]
        for turn, number in enumerate(numbers):
            if number is not None and math.isinf(number):
                raise IntegrityError(
                    f"turn signal {self.name!r} gave {shown(values[turn])} for {where}, turn {turn}; expected a finite "
                    "number, None (no reward) or NaN (a missing reward)"
                )
        return numbers


SHOWN = 8  # rows that a message names


def step_rewards(
    signals: Mapping[Signal, float],
    settings: CreditSettings,
    rows: StepRows,
    *,
    scored: bool,
    tolerated_share: float,
    parts: dict[str, Table] | None = None,
    note: Callable[[str], None] = print,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """(turn_reward_B_K, turn_mask_B_K, metrics): the sum over signals of weight times reward.

    Each of several signals is z-scored over the prompt's turns that have it, before it is weighed; a signal that is equal
    everywhere then adds 0. Turn modes normalise a run's single signal. A turn that lacks a signal gets the other signals: 0
    is the mean of the missing one. A turn whose reward is missing in one signal has none in the sum. ``scored`` False: the
    step has no gains, so that the other signals are its signals. ``parts`` gets each signal's own table by its name.
    ``note`` gets a message per signal about missing rewards and the first reason.

    Raises IntegrityError where more than ``tolerated_share`` of a signal's rewards are missing. Information gains can be
    missing under ``info_gain_on_error=drop`` alone.
    """
    active = {signal: weight for signal, weight in signals.items() if scored or signal.name != INFO_GAIN}
    if not active:
        return torch.zeros_like(rows.gain_B_K), torch.zeros_like(rows.has_gain_B_K), {}
    metrics: dict[str, float] = {}
    valid_B_1, group_B_K = rows.turns.row_valid_B[:, None], rows.group_B[:, None].expand_as(rows.gain_B_K)
    tool_turns = sum(rows.n_tool_turns[row] for row in rows.turns.valid_rows)
    total_B_K = torch.zeros_like(rows.gain_B_K, dtype=torch.float64)
    sum_B_K = torch.zeros_like(rows.has_gain_B_K)
    for signal, weight in active.items():
        reward_B_K, given_B_K = signal.rewards(rows)
        has_B_K, missing_B_K = given_B_K & valid_B_1, given_B_K & ~reward_B_K.isfinite()
        if parts is not None:
            parts[signal.name] = reward_B_K, has_B_K
        lost_B_K, name = has_B_K & reward_B_K.isnan(), f"credit/signal/{signal.name}"
        lost, rewarded = int(lost_B_K.sum()), int(has_B_K.sum())
        if lost:
            reasons = _why_lost(signal, lost_B_K, rows.turns.records)
            message = f"turn signal {signal.name!r} lost {lost} of {rewarded} rewards ({reasons})"
            if lost > tolerated_share * rewarded:
                raise IntegrityError(
                    f"{message}; a share of {tolerated_share:g} is tolerated (faults.max_lost_rewards)"
                )
            note(message)
        metrics[turns_with(signal.name)] = rewarded
        metrics[turns_without(signal.name)] = tool_turns - rewarded
        metrics[f"{name}/lost"] = lost
        metrics |= {f"{name}/{counted}": count for counted, count in signal.counts(rows).items()}
        known_B_K = has_B_K & ~missing_B_K
        if len(known := reward_B_K[known_B_K]):
            metrics |= {f"{name}/mean": known.mean().item(), f"{name}/std": known.std(correction=0).item()}
        part_B_K = reward_B_K.to(torch.float64)
        if len(signals) > 1:
            z_N = z_score(part_B_K.flatten(), group_B_K.flatten(), member_N=known_B_K.flatten())
            part_B_K = z_N.view_as(part_B_K)
        total_B_K = total_B_K + weight * torch.where(missing_B_K, torch.nan, part_B_K)
        sum_B_K = sum_B_K | given_B_K
    return torch.where(sum_B_K, total_B_K, 0.0), sum_B_K, metrics


def _why_lost(signal: Signal, lost_B_K: torch.Tensor, records: list[dict]) -> str:
    """The first reason and its rows."""
    places: dict[str, list[int]] = {}
    for row in lost_B_K.any(dim=1).nonzero().flatten().tolist():
        places.setdefault(signal.why_lost(records[row]), []).append(row)
    (reason, first), *others = places.items()
    listed = ", ".join(map(str, first[:SHOWN])) + (f" and {len(first) - SHOWN} more" if first[SHOWN:] else "")
    more = f"; {sum(len(each) for _, each in others)} more for other reasons" if others else ""
    return f"{reason}; rows {listed}{more}"


def turns_with(name: str) -> str:
    """The metric that counts the turns with a signal's reward, also a missing one."""
    return f"credit/signal/{name}/turns"


def turns_without(name: str) -> str:
    """The metric that counts the other tool turns."""
    return f"credit/signal/{name}/without"
