"""What is observed of the states before a step's turns, and the providers by a column and by a user's function."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from verl_credit.config.keys.reads import COLUMN
from verl_credit.config.settings import CreditSettings
from verl_credit.credit.plugins import load
from verl_credit.credit.turn.value_providers import KEY, PROVIDERS, Provider, Seen
from verl_credit.errors import IntegrityError
from verl_credit.lazy import torch
from verl_credit.turns.rollout.book import as_number
from verl_credit.turns.rollout.reward.qa import stands_in
from verl_credit.turns.step.signals.built_in import ColumnSignal
from verl_credit.turns.step.signals.signal import StepRows, Trajectory, Turn, blamed, listed

LATER = "a value may read what stands before its turn's response alone, and the same each time"


def provider_of(settings: CreditSettings) -> Provider:
    """The provider of `algorithm.turn_values`, which is not null. Raises ValueError for a path that cannot be loaded."""
    name = str(settings.algorithm.turn_values)
    if provider := PROVIDERS.get(name):
        more = provider.names_with_gains if settings.scores_gain else ()
        return replace(provider, names=(*provider.names, *more))
    own = _LoopColumn(name) if name.startswith(COLUMN) else _Own(name, load(name, KEY))
    says = f"V of each turn: as `group`, and on {name}"
    return Provider(name, says, own.observed, (name,), columns=own.columns)


def seen_of(
    rows: StepRows, turn_B_K1: torch.Tensor, gold_B_K1: torch.Tensor | None, value_B_T: torch.Tensor | None
) -> Seen:
    """What providers may observe. ``gold_B_K1``: None where the run measures no gain."""
    return Seen(turn_B_K1, rows.turns.turn_ids_B_T, partial(_progress, rows), gold_B_K1, value_B_T, rows)


def _filled(rows: StepRows, width: int, of_row: Callable[[int], list[list[float]]]) -> torch.Tensor:
    """observed_B_K1_D of a list per state for each valid row; NaN elsewhere."""
    shape = len(rows.turns.records), rows.gain_B_K.shape[1] + 1, width
    observed_B_K1_D = torch.full(shape, torch.nan, dtype=torch.float64)
    for row in rows.turns.valid_rows:
        if observed := of_row(row):
            observed_B_K1_D[row, : len(observed)] = torch.tensor(observed, dtype=torch.float64)
    return observed_B_K1_D


def _progress(rows: StepRows) -> torch.Tensor:
    """Whether a gold answer stands in what was observed so far, and the searches so far, in each state."""

    def of_row(row: int) -> list[list[float]]:
        trajectory, record = rows.trajectory(row), rows.turns.records[row]
        seen, states = False, []
        for k in range(len(trajectory.turns)):
            seen = seen or (k > 0 and stands_in(trajectory.turns[k - 1].observation, trajectory.golds))
            searches = sum(search["turn"] < k for search in record["searches"])
            states.append([float(seen), float(searches)])
        return states

    return _filled(rows, 2, of_row)


class _LoopColumn(ColumnSignal):
    """``column:NAME``: entry k is known after tool turn k, and so in state k + 1. The reward function's values are not
    read, because they are made of the outcome."""

    place = "in the agent loop's record (signals)"

    def __init__(self, name: str):
        super().__init__(name)
        self.name = f"{name} of {KEY}"  # for messages

    def of_rollout(self, rows: StepRows, row: int) -> dict:
        return rows.turns.records[row]["signals"]

    def observed(self, seen: Seen) -> torch.Tensor:
        value_B_K, has_B_K = self.rewards(seen.rows)
        known_B_K = torch.where(has_B_K, value_B_K, torch.nan)
        return torch.nn.functional.pad(known_B_K, (1, 0), value=torch.nan)[:, :, None]


def concealed(trajectory: Trajectory, before: int | None = None) -> Trajectory:
    """The trajectory as it stands before its answer, or before the response of turn ``before``: nothing of its end."""
    turns = trajectory.turns[:-1] if before is None else trajectory.turns[:before]
    return replace(trajectory, turns=[*turns, Turn("")], outcome=None, scores={}, stop_reason="")


class _Own:
    """A user's ``f(trajectory) -> the features of each turn's state``, from what stands before the turn's response."""

    columns = ()

    def __init__(self, name: str, function: Callable[[Trajectory], Any]):
        self._name, self._function, self._tested = name, function, False

    def observed(self, seen: Seen) -> torch.Tensor:
        rows: StepRows = seen.rows
        trajectories = {row: rows.trajectory(row) for row in rows.turns.valid_rows}
        of_row = {row: self._of(row, one) for row, one in trajectories.items() if one.turns}
        widths = {len(state) for states in of_row.values() for state in states}
        if len(widths) > 1:
            raise IntegrityError(
                f"{KEY}={self._name} gave {sorted(widths)} features; expected as many each time"
            )
        self._tested = True
        return _filled(rows, max(widths, default=0), lambda row: of_row.get(row, []))

    def _of(self, row: int, trajectory: Trajectory) -> list[list[float]]:
        with blamed(f"{KEY}={self._name}, row {row}"):
            states = state_features(self._function, concealed(trajectory))
            cut = (len(trajectory.turns) - 1) // 2
            if not self._tested:
                before = state_features(self._function, concealed(trajectory, cut))
                if not same(before, states[: cut + 1]):
                    raise ValueError(
                        f"the features of turn {cut} differ without the turns from it on: {LATER}"
                    )
        return states


def state_features(function: Callable[[Trajectory], Any], trajectory: Trajectory) -> list[list[float]]:
    """The numbers of every state; None becomes NaN. Raises ValueError or IntegrityError for anything else."""
    turns = len(trajectory.turns)
    states = listed(function(trajectory), turns, "it returned", "", f"an entry for each of {turns} turns")
    states = [list(state) if isinstance(state, list | tuple) else [state] for state in states]
    numbers = [[math.nan if one is None else as_number(one) for one in state] for state in states]
    for turn, state in enumerate(numbers):
        if any(map(math.isinf, state)) or len(state) != len(numbers[0]):
            raise ValueError(
                f"turn {turn} has {states[turn]!r:.80}; expected as many finite numbers for each turn"
            )
    return numbers


def same(a: list[list[float]], b: list[list[float]]) -> bool:
    """Equal, where NaN equals NaN."""
    return repr(a) == repr(b)
