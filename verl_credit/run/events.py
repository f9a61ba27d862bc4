"""Notes of a run that a person must see (banner, resume): kept in a file, shown by the progress display."""

from __future__ import annotations

import time
from pathlib import Path

from verl_credit.run.files import EVENTS, append_json


def note(run_dir: Path, kind: str, text: str) -> None:
    """From a worker process: into its own output too."""
    print(text, flush=True)
    record(run_dir, kind, text)


def record(run_dir: Path, kind: str, text: str) -> None:
    append_json(Path(run_dir) / EVENTS, {"time": time.time(), "kind": kind, "text": text})
