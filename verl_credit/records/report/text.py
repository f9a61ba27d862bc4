"""Text from a run's files on the page: escaped, bounded, and with nothing that acts on what stands beside it."""

from __future__ import annotations

import re

from markupsafe import Markup, escape

STOPPED = {
    "answer": "stopped with an answer",
    "no_answer": "stopped without an answer",
    "turn_length": "cut at the token budget of its turn",
    "bad_call": "stopped by a call that cannot be read",
    "length": "stopped by the length limit",
    "max_turns": "stopped by the turn limit",
    "tool_fault": "stopped by a fault of the search tool",
}

# Longer texts are cut here, with a note.
LONGEST = 20_000
# Characters that HTML does not allow, or that change the order of the following text. Controls other than tab and newline
# become their visible picture, the other characters their number.
_PICTURES = {code: chr(0x2400 + code) for code in range(32) if code not in (9, 10)} | {0x7F: "\u2421"}
_INVISIBLE = (
    *range(0x80, 0xA0),
    0x061C,
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
