"""The warning about many rows that a turn mode leaves out, because their turn rewards are not all known."""

from __future__ import annotations

NOTED_SHARE = 0.25
"""Share of a step's rows that count."""
ROWS_LEFT_OUT = "credit/rows_left_out"


def left_out_note(share: float, step: int, mode: str) -> str | None:
    """A warning if more than ``NOTED_SHARE`` of the step's rows read their outcome alone. ``mode``: the turn mode's name."""
    if share <= NOTED_SHARE:
        return None
    return (
        f"warning: in step {step} {share:.0%} of the rows are left out of the turn level: "
        f"algorithm.info_gain_norm_mode={mode} compares whole returns, and a tool turn of these rows has no reward, or lost "
        "it (credit/signal/NAME/without, /lost). They read their outcome's advantage alone. Give 0 for a turn that earned "
        "nothing, or set a mode that compares single turns, such as turn-group-v1d"
    )
