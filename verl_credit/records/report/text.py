"""How numbers and texts appear on a page: numbers with a true minus sign and few decimals; texts escaped and bounded, with
control characters and those that change the direction of text made visible."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from markupsafe import Markup, escape

MINUS = "\N{MINUS SIGN}"


def plain(value: float) -> str:
    return _with_minus(f"{value:.2f}")


def signed(value: float, decimals: int = 3) -> str:
    """Returns the number with its sign."""
    return _with_minus(f"{value:+.{decimals}f}")


def percent(value: float) -> str:
    return _with_minus(f"{100 * value:.1f}") + " %"


def _with_minus(number: str) -> str:
    """Replaces the hyphen by a minus sign; a number that rounds to zero has no sign."""
    return number.replace("-", MINUS) if float(number) else number.lstrip("+-")


def points(value: float) -> str:
    """A difference of two shares, in percentage points."""
    return signed(100 * value, 1) + " points"


def interval(share: float, count: float) -> tuple[float, float]:
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
    return signed(value, 1) + " s"


# Orange below zero, near white at zero, blue above. Orange and blue stay apart under the common kinds of colour blindness;
# both ends are light enough for dark text (contrast above 7:1). The signed number is always beside the colour.
NEGATIVE, NEUTRAL, POSITIVE = (0xF2, 0x9D, 0x5C), (0xF6, 0xF5, 0xF2), (0x76, 0xB0, 0xE6)


def colour(value: float | None, limit: float) -> str:
    """``#rrggbb`` of a value in [-limit, limit]; no value has the colour of zero."""
    share = 0.0 if value is None else max(-1.0, min(1.0, value / limit))
    end = POSITIVE if share > 0 else NEGATIVE
    mixed = (round(n + abs(share) * (e - n)) for n, e in zip(NEUTRAL, end, strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)


@dataclass(frozen=True)
class Scale:
    """The run's own spread decides which colour a value has, and which values are noise: those have none."""

    spread: float
    """Root mean square of the run's values."""

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Scale:
        known = [value for value in values if value is not None]
        return cls(math.hypot(*known) / math.sqrt(len(known) or 1))

    @property
    def limit(self) -> float:
        """Values from here on have the full colour."""
        return 2 * self.spread or 1.0

    @property
    def floor(self) -> float:
        """A value is noise up to here."""
        return self.spread / 20

    def counts(self, value: float | None) -> bool:
        return value is not None and abs(value) > self.floor

    def colour(self, value: float | None) -> str:
        return colour(value if self.counts(value) else None, self.limit)


STOPPED = {
    "answer": "stopped with an answer",
    "no_answer": "stopped without an answer",
    "turn_length": "cut at the token budget of its turn",
    "bad_call": "stopped by a call that cannot be read",
    "length": "stopped by the length limit",
    "max_turns": "stopped by the turn limit",
    "tool_fault": "stopped by a fault of the search, the environment or the engine",
    "done": "the environment's task ended",
    "truncated": "stopped by the environment's limit",
}

# Longer texts are cut here, with a note.
LONGEST = 20_000
# Characters that HTML does not allow, or that change the order of the following text. Controls other than tab and newline
# become their visible picture, the other characters their number.
_PICTURES = {code: chr(0x2400 + code) for code in range(32) if code not in (9, 10)} | {0x7F: "\u2421"}
_INVISIBLE = (
    *range(0x80, 0xA0),
    0x61C,
    0x200E,
    0x200F,
    *range(0x2028, 0x202F),
    *range(0x2066, 0x206A),
    0xFEFF,
)
_SHOWN = _PICTURES | {code: f"[U+{code:04X}]" for code in _INVISIBLE}
_SURROGATE = re.compile("[\ud800-\udfff]")
_TAG = re.compile(r"&lt;/?(?:think|tool_call|tool_response|answer|search|information)&gt;|&lt;\|\w+\|&gt;")


def clean(value: object) -> str:
    """Text that HTML allows; nothing is dropped. Markup stays as it is."""
    return value if isinstance(value, Markup) else _SURROGATE.sub("\ufffd", str(value)).translate(_SHOWN)


def bounded(value: object) -> str:
    """Returns `clean` text of at most ``LONGEST`` characters."""
    if isinstance(value, Markup):
        return value
    text = str(value)
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]} \u2026 ({len(text) - LONGEST:,} more characters)"
    return clean(text)


def dialogue(text: str) -> Markup:
    """Escaped text in which the dialogue's own marks (``<think>``, ``<|im_end|>``) are set back."""
    return Markup(_TAG.sub(r'<span class="mark">\g<0></span>', str(escape(bounded(text)))))
