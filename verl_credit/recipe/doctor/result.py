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
    """``found``: what is there; ``right``: what would be right; ``fix``: the command or setting that fixes it.

    A check with one result leaves the name empty: it is the check's own.
    """

    name: str
    status: Status
    found: str
    right: str = ""
    fix: str = ""

    def as_dict(self) -> dict[str, str]:
        return {key: str(value) for key, value in asdict(self).items()}

    def line(self) -> str:
        """For a refusal: one line."""
        return "; ".join(part for part in (self.found, self.right, self.fix) if part)


def passed(found: str, name: str = "") -> Result:
    return Result(name, Status.PASS, found)


def warned(found: str, right: str = "", fix: str = "", name: str = "") -> Result:
    return Result(name, Status.WARN, found, right, fix)


def failed(found: str, right: str, fix: str = "", name: str = "") -> Result:
    return Result(name, Status.FAIL, found, right, fix)


def skipped(why: str, name: str = "") -> Result:
    return Result(name, Status.SKIP, why)
