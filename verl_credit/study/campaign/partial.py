"""What an interrupted run of the twin leaves behind: it has no checkpoint, so its next start begins at step 1."""

from __future__ import annotations

from pathlib import Path

from verl_credit.records.run.events import steps_done
from verl_credit.records.run.files import METRICS, VALIDATION


def drop_partial(run_dir: Path) -> str:
    """Removes its measurements; its events, and so its hours, stay. Returns what to say, nothing where there are none."""
    steps = steps_done(run_dir)
    there = [path for name in (METRICS, VALIDATION) if (path := run_dir / name).exists()]
    for path in there:
        path.unlink()
    return f"a run of the twin does not go on: dropped after step {steps}, it starts again" if there else ""
