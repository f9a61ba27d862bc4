"""How numbers are written: a true minus sign, and as many digits as a reader can use."""

from __future__ import annotations

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


def seconds(value: float) -> str:
    return f"{value:.1f} s".replace("-", MINUS)


def seconds_change(value: float) -> str:
    text = f"{value:+.1f}"
    return ("0.0" if float(text) == 0 else text.replace("-", MINUS)) + " s"
