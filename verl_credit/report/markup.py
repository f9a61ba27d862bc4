"""Text of a run made safe for a page. Everything that comes from a file passes through here."""

from __future__ import annotations

import html
import re

# Characters that HTML cannot carry: controls other than tab and newline get their visible picture.
_CONTROL = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {0x7F: 0x2421}
_SURROGATE = re.compile("[\ud800-\udfff]")
_TAG = re.compile(r"&lt;/?(?:think|tool_call|tool_response|answer|search|information)&gt;|&lt;\|\w+\|&gt;")


def escape(text: object) -> str:
    """Safe as element content and inside a double-quoted attribute; nothing is dropped."""
    return html.escape(_SURROGATE.sub("\ufffd", str(text)).translate(_CONTROL), quote=True)


def dialogue(text: str) -> str:
    """Escaped text in which the dialogue's own marks (``<think>``, ``<|im_end|>``) are set back."""
    return _TAG.sub(lambda match: f'<span class="mark">{match[0]}</span>', escape(text))
