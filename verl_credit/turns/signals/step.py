"""The turn rewards of a step: one signal, or the weighted sum of several."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from verl_credit.config.settings import FORWARD_SIGNALS, CreditSettings
from verl_credit.credit.groups import z_score
from verl_credit.errors import IntegrityError
from verl_credit.turns.signals.signal import Signal, StepRows

SHOWN = 8
"""The largest number of rows that a message names."""


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
    """(turn_reward_B_K, turn_mask_B_K, metrics). ``scored`` False: the step has no gains and no infopo, so that the
    others are its signals. A run's single signal is not normalised here, because turn modes do that. ``parts`` gets each
    signal's own table by its name. ``note`` gets a message per signal about missing rewards and the first reason.

    Raises IntegrityError where more than ``tolerated_share`` of a signal's rewards are missing. Information gains can be
    missing under ``info_gain_on_error=drop`` alone.
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
        _check_lost(signal, reward_B_K, has_B_K, rows, tolerated_share, note)
        metrics |= _metrics(signal, reward_B_K, has_B_K, rows)
    normalise = settings.algorithm.turn_signal_normalise if len(signals) > 1 else "none"
    return *combined(tables, active, rows, normalise), metrics


def _check_lost(
    signal: Signal,
    reward_B_K: torch.Tensor,
    has_B_K: torch.Tensor,
    rows: StepRows,
    tolerated_share: float,
    note: Callable[[str], None],
) -> None:
    """Note the first reason and its rows, or raise IntegrityError where too many rewards are missing."""
    lost_B_K = has_B_K & reward_B_K.isnan()
    lost, total = int(lost_B_K.sum()), int(has_B_K.sum())
    if not lost:
        return
    places: dict[str, list[int]] = {}
    for row in lost_B_K.any(dim=1).nonzero().flatten().tolist():
        places.setdefault(signal.why_lost(rows.turns.records[row]), []).append(row)
    (reason, first), *others = places.items()
    listed = ", ".join(map(str, first[:SHOWN])) + (f" and {len(first) - SHOWN} more" if first[SHOWN:] else "")
    more = f"; {sum(len(each) for _, each in others)} more for other reasons" if others else ""
    message = f"turn signal {signal.name!r} lost {lost} of {total} rewards ({reason}; rows {listed}{more})"
    if lost > tolerated_share * total:
        raise IntegrityError(
            f"{message}; a share of {tolerated_share:g} is tolerated (faults.max_lost_rewards)"
        )
    note(message)


def _metrics(
    signal: Signal, reward_B_K: torch.Tensor, has_B_K: torch.Tensor, rows: StepRows
) -> dict[str, float]:
    """Numbers of turns with a reward, without one, and with a missing one; mean and spread of the known rewards."""
    lost, rewarded = int((has_B_K & reward_B_K.isnan()).sum()), int(has_B_K.sum())
    name = f"credit/signal/{signal.name}"
    tool_turns = sum(rows.n_tool_turns[row] for row in rows.valid_rows)
    metrics = {
        turns_with(signal.name): rewarded,
        turns_without(signal.name): tool_turns - rewarded,
        f"{name}/lost": lost,
    }
    metrics |= {f"{name}/{counted}": count for counted, count in signal.counts(rows).items()}
    known = reward_B_K[has_B_K & reward_B_K.isfinite()]
    if len(known):
        metrics |= {f"{name}/mean": known.mean().item(), f"{name}/std": known.std(correction=0).item()}
    return metrics


def turns_with(name: str) -> str:
    """The metric that counts the turns with a signal's reward, also a missing one."""
    return f"credit/signal/{name}/turns"


def turns_without(name: str) -> str:
    """The metric that counts the other tool turns."""
    return f"credit/signal/{name}/without"


Table = tuple[torch.Tensor, torch.Tensor]


def combined(
    tables: Mapping[Signal, Table], weights: Mapping[Signal, float], rows: StepRows, normalise: str
) -> Table:
    """(reward_B_K, has_reward_B_K): sum over signals of weight times reward.

    normalise="group": each signal is z-scored over the prompt's turns that have it, before it is weighed; a signal that is
    equal everywhere then adds 0. A turn that lacks a signal gets the others: 0 is that signal's mean. "none": signals are
    added as they are, for turns that have all of them: 0 would be a reward, and perhaps the best reward.
    A turn whose reward is missing in one signal has none in the sum.
    """
    total_B_K = torch.zeros_like(rows.gain_B_K, dtype=torch.float64)
    together, start = (torch.logical_or, False) if normalise == "group" else (torch.logical_and, True)
    sum_B_K = torch.full_like(rows.has_gain_B_K, start)
    for signal, (reward_B_K, has_B_K) in tables.items():
        known_B_K = has_B_K & reward_B_K.isfinite()
        part_B_K = torch.where(known_B_K, reward_B_K.to(torch.float64), 0.0)
        if normalise == "group":
            group_B_K = rows.group_B[:, None].expand_as(part_B_K)
            member_B_K = known_B_K & rows.turns.row_valid_B[:, None]
            z_N = z_score(part_B_K.flatten(), group_B_K.flatten(), member_N=member_B_K.flatten())
            part_B_K = z_N.view_as(part_B_K)
        missing_B_K = has_B_K & ~known_B_K
        total_B_K = total_B_K + weights[signal] * torch.where(missing_B_K, torch.nan, part_B_K)
        sum_B_K = together(sum_B_K, has_B_K)
    return torch.where(sum_B_K, total_B_K, 0.0), sum_B_K
