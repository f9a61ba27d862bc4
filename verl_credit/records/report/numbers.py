"""How numbers are written: a true minus sign, and as many digits as a reader can use."""

from __future__ import annotations

import math

MINUS = "\N{MINUS SIGN}"


def plain(value: float) -> str:
    return f"{value:.2f}".replace("-", MINUS)


def signed(value: float) -> str:
    """Three decimals with sign; a number that rounds to zero has none."""
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
