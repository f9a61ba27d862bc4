"""What is measured and how: the policy, the settings, and the file that names both for a folder's values."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from verl_credit.errors import PreflightError
from verl_credit.records.run.files import write_text

REQUEST, RESULT, TABLE = "request.json", "fidelity.json", "table.txt"
ROLLOUTS = "rollouts.jsonl"
NEW_DIR = "give a new --dir, or the settings of this one"


@dataclass(frozen=True)
class Request:
    """A policy and the settings of its measurement. The measurement's files go to ``out``."""

    out: str
    prompts: int
    rollouts: int
    continuations: int
    split: str = "train"
    seed: int = 0
    modes: list[str] | None = None
    """All registered modes where None."""
    gradient: bool = False
    """The gradients of the credits are measured, too (`gradients`)."""
    minutes: float | None = None
    """No more prompts are valued after that time."""
    name: str = ""
    policy: str = ""
    step: int = 0
    """The run's step that wrote the policy; 0: the policy that the run starts from."""
    about: dict = field(default_factory=dict)
    """The origin of the values (`check_about`), when the run's own engine rolls out."""
    folder: str = ""
    """The user's working folder, where modes and signals of their own are imported from."""

    @property
    def settings(self) -> dict:
        """The settings that ``fidelity.json`` records."""
        names = ("prompts", "rollouts", "continuations", "split", "seed")
        return {name: getattr(self, name) for name in names}

    def timer(self) -> Callable[[], bool]:
        """Starts the time; returns whether ``minutes`` are over."""
        end = None if self.minutes is None else time.monotonic() + 60 * self.minutes
        return lambda: end is not None and time.monotonic() >= end

    @classmethod
    def read(cls, folder: Path) -> Request | None:
        path = folder / REQUEST
        return cls(**json.loads(path.read_text())) if path.is_file() else None


def check_about(
    folder: Path, of_policy: Mapping, *, continuations: int, seed: int, otherwise: str = NEW_DIR
) -> None:
    """Writes the policy and settings of the folder's values into ``about.json``; ``of_policy``: `Subject.about`.

    Raises PreflightError when the file already names others.
    """
    path = folder / "about.json"
    about = {"version": 2, **of_policy, "continuations": continuations, "seed": seed}
    if not path.exists():
        write_text(path, json.dumps(about, indent=1) + "\n")
        return
    try:
        there = json.loads(path.read_text())
    except ValueError as error:
        raise PreflightError(f"{path} is not JSON ({error}); expected what this command writes") from error
    for name, value in about.items():
        if there.get(name) != value:
            raise PreflightError(f"{path}: {name} is {there.get(name)!r}, wanted {value!r}; {otherwise}")
