"""docs/keys.md, written from the declared keys."""

from __future__ import annotations

from verl_credit.config.keys import OURS, Key, keys_of

HEAD = """# Every key

Written by `verl-credit keys > docs/keys.md` from `verl_credit/config/keys/`, where each key is declared once; the tests
compare the two. Set them in a recipe or on the command line: `verl-credit train --config-name lab algorithm.gamma=0.9`.
Keys of verl itself are in verl's documentation; `verl-credit explain --values` shows every value that is not a default.
"""


def keys_page() -> str:
    parts = [HEAD]
    for section in OURS:
        title = f"`{section.prefix}.*`" if section.prefix else "The run"
        rows = "\n".join(_row(key) for key in keys_of(section))
        parts.append(f"## {title}\n\n| key | default | accepted | |\n|---|---|---|---|\n{rows}\n")
    return "\n".join(parts)


def _row(key: Key) -> str:
    cells = (f"`{key.name}`", f"`{written(key.default)}`", key.expected, key.field.description or "")
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def written(value) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(written, value))}]"
    return '""' if value == "" else str(value)
