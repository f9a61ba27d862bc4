"""The companion of the table: a JSON object per line, what a trial began with and what it ended with."""

from __future__ import annotations

import json
import math
from typing import Any

from verl_credit.errors import printable
from verl_credit.records.lineage.table import Damage

STARTED, ENDED = "started", "ended"


def format_event(event: str, exp_id: str, facts: dict[str, Any]) -> bytes:
    """``{"event": ..., "exp_id": ..., facts}``. Raises ValueError for a fact that JSON does not know."""
    if taken := {"event", "exp_id"} & set(facts):
        raise ValueError(
            f"facts of exp_id={exp_id!r} hold {', '.join(sorted(taken))}, which the store writes"
        )
    try:
        line = json.dumps({"event": event, "exp_id": exp_id, **_finite(facts)}, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"facts of exp_id={exp_id!r}: {error}") from None
    return (line + "\n").encode("ascii")


def read_events(content: bytes, file: str) -> tuple[list[dict[str, Any]], list[Damage]]:
    """(events in the order of the file, damaged lines)."""
    events, damaged = [], []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            whole = (
                isinstance(row, dict)
                and isinstance(row.get("exp_id"), str)
                and isinstance(row.get("event"), str)
            )
            what = "" if whole else "no object with exp_id and event"
        except (ValueError, RecursionError):
            what = "not JSON"
        if what:
            damaged.append(Damage(file, number, what, printable(line[:80].decode(errors="replace"))))
        else:
            events.append(row)
    return events, damaged


def _finite(value: Any) -> Any:
    """Numbers that JSON does not know become null."""
    if isinstance(value, dict):
        return {str(key): _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
