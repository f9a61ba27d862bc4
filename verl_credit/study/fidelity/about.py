"""Of which policy and with which settings a folder has values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from verl_credit.errors import PreflightError
from verl_credit.records.run.files import write_text

ABOUT, VERSION = "about.json", 2


def check_about(
    folder: Path,
    of_policy: Mapping,
    *,
    continuations: int,
    seed: int,
    otherwise: str = "give a new --dir, or the settings of this one",
) -> None:
    """Says in the file what the folder's values are of; ``of_policy``: `Measured.about`.

    Raises PreflightError where it says something else already.
    """
    path = folder / ABOUT
    about = {
        "version": VERSION,
        **of_policy,
        "continuations": continuations,
        "seed": seed,
    }
    if not path.exists():
        write_text(path, json.dumps(about, indent=1) + "\n")
        return
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise PreflightError(f"{path} is not JSON ({error}); expected what this command writes") from error
    for name, value in about.items():
        if not isinstance(found, dict) or found.get(name) != value:
            there = found.get(name) if isinstance(found, dict) else found
            raise PreflightError(f"{path}: {name} is {there!r}, wanted {value!r}; {otherwise}")
