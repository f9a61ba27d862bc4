"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    PASS = "pass"
    WARN = "warn"
    """The run can start, and will behave unexpectedly."""
    FAIL = "fail"
    """The run cannot start."""
    SKIP = "skip"
    """There is nothing to check; the text has the reason."""


@dataclass(frozen=True)
class Result:
    """``found`` describes the present state, ``right`` the required state, ``fix`` the command or setting that repairs it.

    A check with one result leaves the name empty; the result then has the check's name.
    """

    name: str
    status: Status
    found: str
    right: str = ""
    fix: str = ""

    def line(self) -> str:
        """The line of a refusal."""
        return "; ".join(part for part in (self.found, self.right, self.fix) if part)


def passed(found: str, name: str = "") -> Result:
    return Result(name, Status.PASS, found)


def warned(found: str, right: str = "", fix: str = "", name: str = "") -> Result:
    return Result(name, Status.WARN, found, right, fix)


def failed(found: str, right: str, fix: str = "", name: str = "") -> Result:
    return Result(name, Status.FAIL, found, right, fix)


def skipped(why: str, name: str = "") -> Result:
    return Result(name, Status.SKIP, why)
