"""What a check returns."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum


class Status(StrEnum):
    PASS = "pass"
    WARN = "warn"
    """It can run, and something about it will surprise."""
    FAIL = "fail"
    """It cannot run."""
    SKIP = "skip"
    """Nothing here to check, and why."""


@dataclass(frozen=True)
class Result:
    """``found``: what is there; ``right``: what would be right; ``mend``: the command or setting that mends it.

    A check with one result leaves the name empty: it is the check's own.
    """

    name: str
    status: Status
    found: str
    right: str = ""
    mend: str = ""

    def as_dict(self) -> dict[str, str]:
        return {key: str(value) for key, value in asdict(self).items()}

    def line(self) -> str:
        """For a refusal: one line."""
        return "; ".join(part for part in (self.found, self.right, self.mend) if part)


def passed(found: str, name: str = "") -> Result:
    return Result(name, Status.PASS, found)


def warned(found: str, right: str = "", mend: str = "", name: str = "") -> Result:
    return Result(name, Status.WARN, found, right, mend)


def failed(found: str, right: str, mend: str = "", name: str = "") -> Result:
    return Result(name, Status.FAIL, found, right, mend)


def skipped(why: str, name: str = "") -> Result:
    return Result(name, Status.SKIP, why)
