"""The turn rewards of a step."""

from __future__ import annotations

from collections.abc import Callable

import torch

from verl_credit.config.settings import FORWARD_SIGNALS, CreditSettings
from verl_credit.errors import IntegrityError
from verl_credit.turns.signals.combine import combined
from verl_credit.turns.signals.signal import Signal, StepRows

SHOWN = 8
"""Rows that a note names."""


def step_rewards(
    signals: dict[Signal, float],
    settings: CreditSettings,
    rows: StepRows,
    *,
    scored: bool,
    tolerated_share: float,
    parts: dict[str, tuple[torch.Tensor, torch.Tensor]] | None = None,
    note: Callable[[str], None] = print,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """(turn_reward_B_K, turn_mask_B_K, metrics). ``scored`` False: a step without gains and infopo, which are then no
    signals of it. A single signal of a run is never normalised here: turn modes do that. ``parts`` is given each signal's
    own table by its name. ``note`` is told once per signal which rewards were lost, and why.

    Raises IntegrityError where more than ``tolerated_share`` of a signal's rewards were lost: information gains too, which
    are lost under ``info_gain_on_error=drop`` alone.
    """
    active = {
        signal: weight for signal, weight in signals.items() if scored or signal.name not in FORWARD_SIGNALS
    }
    if not active:
        return torch.zeros_like(rows.gain_B_K), torch.zeros_like(rows.has_gain_B_K), {}
    tables = {signal: signal.rewards(rows) for signal in active}
    metrics: dict[str, float] = {}
    for signal, (reward_B_K, has_B_K) in tables.items():
        has_B_K = has_B_K & rows.turns.row_valid_B[:, None]
        if parts is not None:
            parts[signal.name] = reward_B_K, has_B_K
        _tell_lost(signal, reward_B_K, has_B_K, rows, tolerated_share, note)
        metrics |= _metrics(signal, reward_B_K, has_B_K, rows)
    normalise = settings.algorithm.turn_signal_normalise if len(signals) > 1 else "none"
    return *combined(tables, active, rows, normalise), metrics


def _tell_lost(
    signal: Signal,
    reward_B_K: torch.Tensor,
    has_B_K: torch.Tensor,
    rows: StepRows,
    tolerated_share: float,
    note: Callable[[str], None],
) -> None:
    """Note the first reason and its rows, or raise IntegrityError where too many were lost."""
    lost_B_K = has_B_K & reward_B_K.isnan()
    lost, asked = int(lost_B_K.sum()), int(has_B_K.sum())
    if not lost:
        return
    places: dict[str, list[int]] = {}
    for row in lost_B_K.any(dim=1).nonzero().flatten().tolist():
        places.setdefault(signal.why_lost(rows.turns.records[row]), []).append(row)
    (reason, first), *others = places.items()
    shown = ", ".join(map(str, first[:SHOWN])) + (f" and {len(first) - SHOWN} more" if first[SHOWN:] else "")
    more = f"; {sum(len(each) for _, each in others)} more for other reasons" if others else ""
    said = f"turn signal {signal.name!r} lost {lost} of {asked} rewards ({reason}; rows {shown}{more})"
    if lost > tolerated_share * asked:
        raise IntegrityError(f"{said}; a share of {tolerated_share:g} is tolerated (faults.max_lost_rewards)")
    note(said)


def _metrics(
    signal: Signal, reward_B_K: torch.Tensor, has_B_K: torch.Tensor, rows: StepRows
) -> dict[str, float]:
    """Turns with a reward, turns without, lost ones; mean and spread of those that are known."""
    lost, asked = int((has_B_K & reward_B_K.isnan()).sum()), int(has_B_K.sum())
    name = f"credit/signal/{signal.name}"
    tool_turns = sum(rows.n_tool_turns[row] for row in rows.valid_rows)
    metrics = {
        turns_with(signal.name): asked,
        turns_without(signal.name): tool_turns - asked,
        f"{name}/lost": lost,
    }
    metrics |= {f"{name}/{counted}": count for counted, count in signal.counts(rows).items()}
    known = reward_B_K[has_B_K & reward_B_K.isfinite()]
    if len(known):
        metrics |= {f"{name}/mean": known.mean().item(), f"{name}/std": known.std(correction=0).item()}
    return metrics


def turns_with(name: str) -> str:
    """The metric that counts the turns which a signal gave a reward, lost ones included."""
    return f"credit/signal/{name}/turns"


def turns_without(name: str) -> str:
    """The metric that counts the other tool turns."""
    return f"credit/signal/{name}/without"
