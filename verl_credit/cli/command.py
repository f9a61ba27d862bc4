"""Common options of commands, and the exit of a command that is refused, fails or is interrupted."""

import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from verl_credit.errors import ConfigError, ConfigErrors, ExitCode, PreflightError, Terminated, one_line

PLAIN = {"add_completion": False, "rich_markup_mode": None}
GOES_ON = "interrupted; the same command goes on"
SHIPPED = "a shipped recipe (lab) or a file in --config-dir"


def json_object(text: str) -> dict:
    try:
        return dict(json.loads(text))
    except (TypeError, ValueError):
        raise ValueError(f"{text!r} is not a JSON object") from None


# Options that several commands have.
ConfigDir = Annotated[str | None, Option(help="folder with your own recipes")]
Overrides = Annotated[list[str], Argument(help="Hydra overrides: key=value")]
RunOverrides = Annotated[list[str], Argument(help="Hydra overrides of the run's configuration")]
AsJson = Annotated[bool, Option("--json", help="machine-readable")]
Continuations = Annotated[int, Option(help="per distinct context; an even number")]
Params = Annotated[dict | None, Option(parser=json_object, help="JSON object with options of the operator")]
Parallel = Annotated[int | None, Option(min=1, help="processes; as many as there are cores if not given")]
MovedLab = Annotated[Path | None, Option(help="the lab's folder, where it was moved")]
Out = Annotated[Path | None, Option(help="a new folder; beside the run if not given")]


class ChildFailed(RuntimeError):
    """A run that the command started in a process of its own failed."""


def ends(
    line: str,
    *refused: type[Exception],
    failed: Mapping[type[Exception], ExitCode] = {},
    interrupted: str = "",
    to: str = "stdout",
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Ends a command with a line and an exit code for the errors that it expects; any other error is a traceback.

    ``line`` precedes the message and may have the command's arguments in braces. ``refused`` end with 4, as
    ConfigError and PreflightError always do, ``failed`` with their own code, and Ctrl-C with 130 after ``interrupted``.
    A command that returns nothing is done.
    """

    def decorate(work: Callable[..., int]) -> Callable[..., int]:
        @wraps(work)
        def run(*given, **named) -> int:
            try:
                return work(*given, **named) or ExitCode.DONE
            except (ConfigError, PreflightError, *refused) as error:
                several = isinstance(error, ConfigErrors)
                text, code = str(error) if several else one_line(str(error)), ExitCode.PREFLIGHT
            except tuple(failed) as error:
                text, code = str(error), next(failed[kind] for kind in failed if isinstance(error, kind))
            except KeyboardInterrupt:
                if not interrupted:
                    raise
                print(interrupted, flush=True)
                return ExitCode.INTERRUPTED
            bound = signature(work).bind(*given, **named)
            bound.apply_defaults()
            values = bound.arguments.items()
            given = {k: " ".join(map(str, v)) if isinstance(v, list) else v for k, v in values}
            print(f"verl-credit {line.format(**given)}: {text}", file=getattr(sys, to), flush=True)
            return code

        return run

    return decorate


@contextmanager
def modules_from_here() -> Iterator[None]:
    """Makes the user's modules in the working directory importable."""
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path.remove("")


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Makes the first SIGTERM end the run as Ctrl-C does, so that Ray and the retriever are stopped. Later ones are ignored:
    they would end that ending, and the run would be recorded as a crash or not at all."""

    def interrupt(signum, frame):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
