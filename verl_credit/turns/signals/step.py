"""The turn rewards of a step."""

from __future__ import annotations

import torch

from verl_credit.config.settings import FORWARD_SIGNALS, CreditSettings
from verl_credit.errors import IntegrityError
from verl_credit.turns.signals.combine import combined
from verl_credit.turns.signals.signal import Signal, StepRows


def step_rewards(
    signals: dict[Signal, float],
    settings: CreditSettings,
    rows: StepRows,
    *,
    scored: bool,
    tolerated_share: float,
    parts: dict[str, tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """(turn_reward_B_K, turn_mask_B_K, metrics). ``scored`` False: a step without gains and infopo, which are then no
    signals of it. A single signal of a run is never normalised here: turn modes do that. ``parts`` is given each signal's
    own table by its name.

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
        _refuse_many_lost(signal, reward_B_K, has_B_K, rows, tolerated_share)
        metrics |= _metrics(signal, reward_B_K, has_B_K, rows)
    normalise = settings.algorithm.turn_signal_normalise if len(signals) > 1 else "none"
    return *combined(tables, active, rows, normalise), metrics


def _refuse_many_lost(
    signal: Signal, reward_B_K: torch.Tensor, has_B_K: torch.Tensor, rows: StepRows, tolerated_share: float
) -> None:
    lost, asked = int((has_B_K & reward_B_K.isnan()).sum()), int(has_B_K.sum())
    if lost > tolerated_share * asked:
        errors = [record.get("signal_errors", {}).get(signal.name) for record in rows.turns.records]
        reason = next(filter(None, errors), "the signal gave NaN")
        raise IntegrityError(
            f"turn signal {signal.name!r} lost {lost} of {asked} rewards ({reason}); a share of {tolerated_share:g} is "
            "tolerated (faults.max_lost_rewards)"
        )


def _metrics(
    signal: Signal, reward_B_K: torch.Tensor, has_B_K: torch.Tensor, rows: StepRows
) -> dict[str, float]:
    """Turns with a reward, turns without, lost ones; mean and spread of those that are known."""
    lost, asked = int((has_B_K & reward_B_K.isnan()).sum()), int(has_B_K.sum())
    name = f"credit/signal/{signal.name}"
    tool_turns = sum(rows.n_tool_turns[row] for row in rows.valid_rows)
    metrics = {turns_with(signal.name): asked, f"{name}/without": tool_turns - asked, f"{name}/lost": lost}
    known = reward_B_K[has_B_K & reward_B_K.isfinite()]
    if len(known):
        metrics |= {f"{name}/mean": known.mean().item(), f"{name}/std": known.std(correction=0).item()}
    return metrics


def turns_with(name: str) -> str:
    """The metric that counts the turns which a signal gave a reward, lost ones included."""
    return f"credit/signal/{name}/turns"
