"""What a command ends with: exit codes, and the errors that have one (docs/host.md)."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Everything a command of ours ends with; typer itself ends with 2 for a wrong command line."""

    DONE = 0
    """The work is done; for ``doctor`` no check failed, for ``diff`` the two are equal."""

    FAILED = 1
    """An error that is none of ours to explain (a worker died, CUDA ran out of memory); an operator breaks a law."""

    DIFFERENT = 1
    """``diff``: the two differ."""

    NOTHING_LEFT = 3
    """``train``: the last checkpoint is at the run's last step and evaluated; nothing was started."""

    PREFLIGHT = 4
    """Refused before anything heavy started: configuration, machine, data, model, server, a second run in the folder."""

    INTEGRITY = 5
    """Stopped because going on would have made numbers that mean nothing."""

    INTERRUPTED = 130
    """Ctrl-C or SIGTERM; the next run goes on from the last checkpoint."""


class ConfigError(ValueError):
    """Names the key, its value and what would be accepted."""


class PreflightError(RuntimeError):
    """The run cannot start; says what is missing and what would be right."""


class IntegrityError(RuntimeError):
    """The run's numbers could not be trusted if it went on."""


class PlanError(ValueError):
    """Names the key, its value and what would be right."""
