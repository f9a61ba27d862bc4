"""What a measurement that runs in another process is asked for, and where it leaves what it found."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from verl_credit.records.run.files import write_text

REQUEST, RESULT, TABLE = "request.json", "fidelity.json", "table.txt"
ROLLOUTS = "rollouts.jsonl"


@dataclass(frozen=True)
class Request:
    """In the folder of the run that makes it. The measurement's own files go to ``out``."""

    out: str
    name: str
    """Of the policy."""
    policy: str
    step: int
    """Of the run; 0: the policy that it starts from."""
    prompts: int
    rollouts: int
    continuations: int
    split: str
    seed: int
    modes: list[str] | None
    minutes: float | None
    about: dict
    """What its values are of (`check_about`)."""
    folder: str
    """Where the user stands: modes and signals of their own are found there."""

    @property
    def settings(self) -> dict:
        names = ("prompts", "rollouts", "continuations", "split", "seed")
        return {name: getattr(self, name) for name in names}

    def write(self, folder: Path) -> None:
        write_text(folder / REQUEST, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Request | None:
        path = folder / REQUEST
        return cls(**json.loads(path.read_text())) if path.is_file() else None
