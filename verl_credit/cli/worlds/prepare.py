"""`verl-credit prepare` on the command line."""

from __future__ import annotations

from pathlib import Path

from verl_credit.errors import ExitCode, one_line
from verl_credit.worlds.data.prepare import prepare
from verl_credit.worlds.data.records import PrepareError


def run(data_set: str, source: str, out: Path, **options) -> int:
    """Exit code 0, or 4 with one line where nothing was written. ``options``: those of ``prepare``."""
    try:
        tally = prepare(data_set, source, out, **options)
    except (PrepareError, OSError) as error:
        print(f"verl-credit prepare: {one_line(str(error))}")
        return ExitCode.PREFLIGHT
    print(tally.table())
    print(f"{data_set} ready: {out}")
    return ExitCode.DONE
