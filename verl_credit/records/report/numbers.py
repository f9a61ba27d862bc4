"""How numbers are written and coloured: a true minus sign, and as many digits as a reader can use."""

from __future__ import annotations

import math
from collections.abc import Iterable

MINUS = "\N{MINUS SIGN}"


def plain(value: float) -> str:
    return f"{value:.2f}".replace("-", MINUS)


def signed(value: float) -> str:
    """Three decimals with sign; a number that rounds to zero has no sign."""
    text = f"{value:+.3f}"
    return "0.000" if float(text) == 0 else text.replace("-", MINUS)


def percent(value: float) -> str:
    return f"{100 * value:.1f} %".replace("-", MINUS)


def points(value: float) -> str:
    """A difference of two shares, in percentage points."""
    text = f"{100 * value:+.1f}"
    return ("0.0" if float(text) == 0 else text.replace("-", MINUS)) + " points"


def interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of ``count`` answers: (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n)."""
    z2 = 1.959964**2 / count
    middle, half = share + z2 / 2, math.sqrt(z2 * share * (1 - share) + z2**2 / 4)
    return max((middle - half) / (1 + z2), 0.0), min((middle + half) / (1 + z2), 1.0)


def duration(value: float) -> str:
    """Hours and minutes, or minutes and seconds."""
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def seconds(value: float) -> str:
    return f"{value:.1f} s".replace("-", MINUS)


def seconds_change(value: float) -> str:
    text = f"{value:+.1f}"
    return ("0.0" if float(text) == 0 else text.replace("-", MINUS)) + " s"


# Orange below zero, near white at zero, blue above. Orange and blue stay apart under the common kinds of colour blindness;
# both ends are light enough for dark text (contrast above 7:1). The signed number is always beside the colour.
NEGATIVE, NEUTRAL, POSITIVE = (0xF2, 0x9D, 0x5C), (0xF6, 0xF5, 0xF2), (0x76, 0xB0, 0xE6)


def limit(values: Iterable[float | None]) -> float:
    """Half width of the scale: the largest absolute value on the page; 1 when all values are 0 or missing."""
    return max((abs(value) for value in values if value is not None), default=0.0) or 1.0


def colour(value: float | None, limit: float) -> str:
    """``#rrggbb`` of a value in [-limit, limit]; no value has the colour of zero."""
    share = 0.0 if value is None else max(-1.0, min(1.0, value / limit))
    end = POSITIVE if share > 0 else NEGATIVE
    mixed = (round(n + abs(share) * (e - n)) for n, e in zip(NEUTRAL, end, strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)
