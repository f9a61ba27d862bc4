"""A diverging colour scale: orange below zero, near white at zero, blue above.

Orange and blue stay apart under the common kinds of colour blindness, and both ends are light enough for
dark text (contrast above 7:1). Colour never stands alone: the signed number is always written with it.
"""

from __future__ import annotations

from collections.abc import Iterable

NEGATIVE, NEUTRAL, POSITIVE = (0xF2, 0x9D, 0x5C), (0xF6, 0xF5, 0xF2), (0x76, 0xB0, 0xE6)


def limit(values: Iterable[float | None]) -> float:
    """Half width of the scale: the largest absolute value shown; 1 when all are 0 or there are none."""
    return max((abs(value) for value in values if value is not None), default=0.0) or 1.0


def colour(value: float | None, limit: float) -> str:
    """``#rrggbb`` of a value in [-limit, limit]; no value has the colour of zero."""
    share = 0.0 if value is None else max(-1.0, min(1.0, value / limit))
    end = POSITIVE if share > 0 else NEGATIVE
    mixed = (round(n + abs(share) * (e - n)) for n, e in zip(NEUTRAL, end, strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)
