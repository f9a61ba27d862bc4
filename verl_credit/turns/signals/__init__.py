"""Turn signals by name, column or dotted path; `signal.py` has their interface."""

from __future__ import annotations

from functools import lru_cache

from verl_credit.config.settings import CreditSettings
from verl_credit.credit.plugins import load
from verl_credit.turns.signals.known import COLUMN, SIGNALS, ColumnSignal
from verl_credit.turns.signals.own import GroupSignal, TrajectorySignal, ask_signals, own_signal
from verl_credit.turns.signals.signal import (
    Group,
    Signal,
    StepRows,
    Trajectory,
    Turn,
    make_trajectory,
    turn_texts,
)
from verl_credit.turns.signals.step import step_rewards, turns_with, turns_without

KEY = "algorithm.turn_signal"


def find_signal(name: str, params: dict, key: str = KEY) -> Signal:
    """Raises ValueError, with the key that names it, where no signal has that name and nothing can be imported by it."""
    if name in SIGNALS:
        return SIGNALS[name](name)
    if name.startswith(COLUMN):
        return ColumnSignal(name)
    return own_signal(name, _loaded(name, key), params)


@lru_cache(maxsize=16)
def _loaded(name: str, key: str):
    return load(name, key)


def signals_of(settings: CreditSettings) -> dict[Signal, float]:
    """The signals of a run and their weights."""
    params, key = settings.algorithm.turn_signal_params, KEY
    if settings.algorithm.turn_signals is not None:
        key = f"{KEY}s"
    return {find_signal(name, params, key): weight for name, weight in settings.turn_signals.items()}


__all__ = [
    "COLUMN", "SIGNALS", "Group", "GroupSignal", "Signal", "StepRows", "Trajectory", "TrajectorySignal", "Turn",
    "ask_signals", "find_signal", "make_trajectory", "own_signal", "signals_of", "step_rewards", "turn_texts",
    "turns_with", "turns_without",
]  # fmt: skip
