"""Sets docstrings for the site: shapes, results, errors, departures and source get a paragraph each; papers get a link."""

import re

from griffe import Extension

FIELD = r"(Shapes:|Source:|Errors:|Raises|Returns|Departures?(?=[ :]))"
PAPER = re.compile(r"(?<![\w/.])(\d{4}\.\d{5})(?![\w.]*\d)")


def set_text(text: str) -> str:
    """Lines that are indented are equations and stay as they are."""
    lines = []
    for line in text.splitlines():
        if not line.startswith(" "):
            line = re.sub(rf"^{FIELD}", r"\n**\1**", line)
            line = re.sub(rf"(?<=[.;)]) {FIELD}", r"\n\n**\1**", line)
            line = PAPER.sub(r"[\1](https://arxiv.org/abs/\1)", line)
        lines.append(line)
    return "\n".join(lines)


class Fields(Extension):
    def on_object(self, *, obj, **_):
        if obj.docstring:
            obj.docstring.value = set_text(obj.docstring.value)
