"""Turn signals; `signal.py` has their interface."""

from verl_credit.turns.signals.known import COLUMN, SIGNALS, find_signal, signals_of
from verl_credit.turns.signals.own import GroupSignal, TrajectorySignal, ask_signals, own_signal
from verl_credit.turns.signals.signal import (
    Group,
    Signal,
    StepRows,
    Trajectory,
    Turn,
    make_trajectory,
    step_rewards,
    turn_texts,
    turns_with,
    turns_without,
)

__all__ = [
    "COLUMN", "SIGNALS", "Group", "GroupSignal", "Signal", "StepRows", "Trajectory", "TrajectorySignal", "Turn",
    "ask_signals", "find_signal", "make_trajectory", "own_signal", "signals_of", "step_rewards", "turn_texts",
    "turns_with", "turns_without",
]  # fmt: skip
