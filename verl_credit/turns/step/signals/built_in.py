"""The built-in signals, and every signal by its name, column or dotted path."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from verl_credit.config.keys.reads import COLUMN
from verl_credit.config.settings import INFO_GAIN, CreditSettings
from verl_credit.credit.operator import RESETS
from verl_credit.credit.plugins.load import load, plugin_path
from verl_credit.errors import IntegrityError
from verl_credit.lazy import torch
from verl_credit.turns.step.signals.own import own_signal
from verl_credit.turns.step.signals.signal import Signal, StepRows, Table

KEY = "algorithm.turn_signal"
_loaded = lru_cache(maxsize=16)(load)
NOT_SCORED = "log-probs that are not finite, or no room for what is scored"


class InfoGainSignal(Signal):
    """The change of the policy's own probability of the gold answer (`turns/score/gains.py`)."""

    says = "how much closer the policy's own probability of the gold answer moved"
    reads = "the scorer's log-probs of the gold answer"
    outputs = RESETS

    def rewards(self, rows: StepRows) -> Table:
        return rows.gain_B_K.to(torch.float64), rows.has_gain_B_K

    def why_lost(self, record: dict) -> str:
        return NOT_SCORED


class ToolRewardSignal(Signal):
    """The sum of the rewards that verl's tools return for the calls of a turn; or the agent loop's reward of the turn."""

    says = "the sum of the rewards of a turn's calls; a turn whose tools returned none has no reward"
    reads = "the agent loop's turn_rewards"

    def rewards(self, rows: StepRows) -> Table:
        return self.table(rows, lambda row: rows.turns.turn_rewards[row][: rows.n_tool_turns[row]])


class ColumnSignal(Signal):
    """``column:NAME``: a list with an entry per tool turn, from the first of three places where it is not null.

    The reward function's values belong to the rollout: the list has as many entries as the rollout has tool turns.
    `extra_info` and the data file's columns belong to the question, whose rollouts differ in length: entry k is for tool
    turn k of each, and entries past a rollout's last tool turn are not used.
    """

    says = "a list with an entry per tool turn; null: the turn has no reward"
    reads = "the reward function's values, else the row's extra_info, else the data file's column"
    place = "among the reward function's values"

    def __init__(self, name: str):
        super().__init__(name)
        self.columns = (name.removeprefix(COLUMN),)

    def rewards(self, rows: StepRows) -> Table:
        return self.table(rows, lambda row: self._values_of(rows, row))

    def of_rollout(self, rows: StepRows, row: int) -> dict:
        """The lists that belong to the rollout, at ``place``."""
        return rows.turns.scores[row]

    def _values_of(self, rows: StepRows, row: int) -> Any:
        import numpy as np

        turns, (column,) = rows.turns, self.columns
        places = {
            self.place: self.of_rollout(rows, row),
            "in extra_info": turns.extra_infos[row],
            "in the data file": turns.columns[row],
        }
        needed = rows.n_tool_turns[row]
        said = f"turn signal {self.name!r}: {column!r} of row {row}"
        for number, (place, found) in enumerate(places.items()):
            if (values := found.get(column)) is None:
                continue
            values = values.tolist() if isinstance(values, np.ndarray) else values
            if number == 0 or not isinstance(values, list | tuple):
                return values
            if len(values) < needed:
                raise IntegrityError(
                    f"{said} has {len(values)} entries {place}, and the row has {needed} tool turns; a list of the data set "
                    "needs an entry, which may be null, for every tool turn that a rollout can take"
                )
            return values[:needed]
        if not needed:
            return []
        null = [place for place, found in places.items() if column in found]
        there = "; ".join(
            f"{place}: {', '.join(map(str, found)) or 'none'}" for place, found in places.items()
        )
        raise IntegrityError(
            f"{said} is {f'null {null[0]}' if null else 'missing'}; expected a list with a number or null for each of its "
            f"tool turns. Columns {there}"
        )


SIGNALS = {
    INFO_GAIN: InfoGainSignal,
    "tool_reward": ToolRewardSignal,
}  # fmt: skip


def find_signal(name: str, params: dict, key: str = KEY) -> Signal:
    """Raises ValueError, with the key that names it, where no signal has that name and nothing can be imported by it."""
    if name in SIGNALS:
        return SIGNALS[name](name)
    if name.startswith(COLUMN):
        return ColumnSignal(name)
    return own_signal(name, _loaded(plugin_path(name) or name, key), params)


def signals_of(settings: CreditSettings) -> dict[Signal, float]:
    """The signals of a run and their weights."""
    params, key = (
        settings.algorithm.turn_signal_params,
        KEY + "s" * (settings.algorithm.turn_signals is not None),
    )
    return {find_signal(name, params, key): weight for name, weight in settings.turn_signals.items()}
