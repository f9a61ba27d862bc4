"""A mark stands in the place of a value that only a run would know. It holds the number of its reason."""

from __future__ import annotations

import re

MARK = re.compile("\x02(\\d*)\x03?|\x03")
_DECLARED = re.compile("(?:\x02|\\\\002)(\\d+)|[\x02\x03]|\\\\00[23]")
_OTHER = "it is made of what only a run would know"


class Reason(str):
    """Why a value is not known. ``variable``: whose value in the environment closes the gap; "" where none does."""

    variable: str

    def __new__(cls, text: str, variable: str = "") -> Reason:
        reason = super().__new__(cls, text)
        reason.variable = variable
        return reason


class Marks:
    def __init__(self) -> None:
        self.reasons = [_OTHER]

    def __call__(self, why: str) -> str:
        if why not in self.reasons:
            self.reasons.append(why)
        return f"\x02{self.reasons.index(why)}\x03"

    def why(self, text: str) -> str:
        """The reason of the first mark of the text."""
        numbers = (int(number) for number in MARK.findall(text) if number)
        return self.reasons[next((number for number in numbers if number < len(self.reasons)), 0)]


def mark_in(declared: str) -> str:
    """The mark in what `declare -p` prints, which has control characters as octal numbers; "" where there is none."""
    match = _DECLARED.search(declared)
    return f"\x02{match[1] or 0}\x03" if match else ""
