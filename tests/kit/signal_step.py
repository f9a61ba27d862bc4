"""One question's step for tests of turn signals."""

from __future__ import annotations

import torch

from kit.byte_world import make_tokenizer
from kit.settings import settings
from kit.turn_rows import turn_batch
from verl_credit.turns.step.signals.signal import StepRows, step_rewards


def step_of(*rows, gains=None):
    """One question's rows. ``gains``: per row and tool turn; None where a turn has none."""
    tokenizer = make_tokenizer()
    turns = turn_batch(list(rows), tokenizer)
    width = max(int(turns.n_turns_B.max()) - 1, 0)
    table = [[None] * width for _ in rows] if gains is None else gains
    has = torch.tensor([[gain is not None for gain in row] for row in table])
    gain = torch.tensor([[gain or 0.0 for gain in row] for row in table], dtype=torch.float64)
    same = torch.zeros(len(rows), dtype=torch.int64)
    return StepRows(turns, tokenizer.decode, torch.zeros(len(rows)), same, gain, has)


def rewards(signals, rows, tolerated_share=0.0, note=print, **changes):
    chosen = settings(turn_signals={signal.name: weight for signal, weight in signals.items()}, **changes)
    return step_rewards(signals, chosen, rows, scored=True, tolerated_share=tolerated_share, note=note)
