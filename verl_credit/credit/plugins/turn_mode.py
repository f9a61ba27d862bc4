"""A turn mode by name or dotted path."""

from __future__ import annotations

from functools import lru_cache

from verl_credit.credit.plugins.load import load
from verl_credit.credit.turn.mode import TurnMode, as_turn_mode
from verl_credit.credit.turn.modes import MODES


@lru_cache(maxsize=64)
def find_turn_mode(name: str, key: str = "algorithm.info_gain_norm_mode") -> TurnMode:
    """Raises ValueError where neither a mode nor an importable function has that name."""
    return MODES[name] if name in MODES else as_turn_mode(load(name, key), name)
