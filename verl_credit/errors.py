"""The exit codes of commands, and the errors that have one (docs/run.md)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum, nonmember
from functools import reduce
from typing import Any


class ExitCode(IntEnum):
    """The exit codes of our commands. Typer itself ends with 2 for a wrong command line.

    A number that means something else to one command is no member, so that it never prints another meaning's name."""

    DONE = 0
    """The work is done; for ``doctor`` no check failed, for ``diff`` the two are equal."""

    FAILED = 1
    """Another error (a worker died, CUDA ran out of memory), or an operator breaks a law."""

    DIFFERENT = nonmember(1)
    """``diff``: the two differ."""

    NOTHING_LEFT = 3
    """``train``: the last checkpoint is at the run's last step and evaluated; nothing was started."""

    PARTIAL = nonmember(3)
    """``adopt``: the recipe is written, and something that decides the run is not in it."""

    PREFLIGHT = 4
    """Refused before anything heavy started: configuration, machine, data, model, server, a second run in the folder."""

    INTEGRITY = 5
    """The run stopped, because its further numbers would have been wrong."""

    INTERRUPTED = 130
    """Ctrl-C or SIGTERM; the next run goes on from the last checkpoint."""


class ConfigError(ValueError):
    """A ``key`` whose ``value`` cannot be used, and what is ``accepted``: a list of names, or a sentence.

        key=value (did you mean b?): accepted are a, b
        key=value with other=thing: sentence

    ``beside``: the other keys that make the value wrong. ``shown``: the text of the value, by default as on the command
    line. A ``message`` replaces the rendering, for errors that are not about one value of one key. ``meant``: the
    key for which an unknown key was probably written.
    """

    def __init__(
        self,
        message: str = "",
        *,
        key: str = "",
        value: Any = None,
        accepted: str | Iterable[str] = "",
        beside: Mapping[str, Any] | None = None,
        shown: str | None = None,
        meant: str = "",
    ) -> None:
        self.key, self.value, self.meant, self.beside = key, value, meant, tuple(beside or ())
        self.accepted = accepted if isinstance(accepted, str) else list(accepted)
        text = f"{printable(key)}={show_value(value) if shown is None else shown}"
        if beside:
            text += " with " + ", ".join(f"{name}={show_value(other)}" for name, other in beside.items())
        if isinstance(self.accepted, list):
            text += f"{did_you_mean(value, self.accepted)}: accepted are {', '.join(self.accepted)}"
        else:
            text += f": {self.accepted}"
        super().__init__(one_line(message or text))

    @classmethod
    def of(cls, config: Mapping, key: str, *beside: str, accepted: str | Iterable[str]) -> ConfigError:
        """The error with the values that ``config`` has for ``key`` and for the keys ``beside`` it."""
        names = (key, *beside)
        values = {name: reduce(lambda node, part: node[part], name.split("."), config) for name in names}
        return cls(key=key, value=values.pop(key), accepted=accepted, beside=values)


class ConfigErrors(ConfigError):
    """Several refusals of one configuration, in order. Key, value and accepted values are those of the first."""

    def __init__(self, errors: Iterable[ConfigError]) -> None:
        self.errors: list[ConfigError] = []
        for error in errors:
            for one in error.errors if isinstance(error, ConfigErrors) else [error]:
                if not any(_explains(earlier, one) for earlier in self.errors):
                    self.errors.append(one)
        self.__dict__.update(vars(self.errors[0]), errors=self.errors)
        self.args = ("\n  also: ".join(map(str, self.errors)),)


def joined(errors: Iterable[ConfigError]) -> ConfigError:
    """The errors as one; one error as it is."""
    several = ConfigErrors(errors)
    return several if len(several.errors) > 1 else several.errors[0]


def _explains(earlier: ConfigError, later: ConfigError) -> bool:
    """Would the later refusal probably go away with the earlier one, because it is about the same key?"""
    changed, key = {earlier.key, earlier.meant} - {""}, f"{later.key}."
    nested = bool(later.key) and any(
        f"{one}.".startswith(key) or key.startswith(f"{one}.") for one in changed
    )
    return nested or str(earlier) == str(later) or bool(changed & set(later.beside))


def show_value(value: Any) -> str:
    """The value as it is written on the command line."""
    if value is None:
        return "null"
    return printable(str(value).lower() if isinstance(value, bool) else str(value))


def one_line(text: str) -> str:
    """The text in one line, printable everywhere."""
    return printable(re.sub(r"\s*\n\s*", " ", text.strip()))


def printable(text: str) -> str:
    """The text with control characters and lone surrogates as escapes: ``\\n``, ``\\x1b``, ``\\ud800``."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def did_you_mean(name: object, names: Iterable[str], show: Callable[[str], str] = str) -> str:
    """`` (did you mean x?)``, or "" where no name is close."""
    near = difflib.get_close_matches(str(name), list(names), n=1)
    return f" (did you mean {show(near[0])}?)" if near else ""


def unknown_key(
    parent: str,
    name: str,
    names: Iterable[str],
    value: Any = None,
    elsewhere: str | None = None,
    remedy: str = "",
) -> ConfigError:
    """The error for a ``name`` that is not among the ``names`` below ``parent``. ``value``: its text without secrets.
    ``elsewhere``: the key of this name in another section. ``remedy``: what to write for another project's key."""
    below, names, first = f"{parent}." if parent else "", list(names), name.partition(".")[0]
    unknown = f"unknown key {below}{printable(name)}" + ("" if value is None else f"={value}")
    if remedy:
        meant = remedy.partition("=")[0].lstrip("+")
        use = remedy if remedy.startswith("leave it out") else f"write {remedy}"
        return ConfigError(f"{unknown}: {use}", key=below + name, value=value, accepted=use, meant=meant)
    near = difflib.get_close_matches(first, names, n=1, cutoff=NEAR_KEY)
    meant = elsewhere or (below + near[0] if near else "")
    hint, where = f" (did you mean {meant}?)" if meant else "", f" below {parent}" if parent else ""
    message = f"{unknown}{hint}: {_listed(first, names, where)}"
    return ConfigError(message, key=below + name, value=value, accepted=names, meant=meant)


NEAR_KEY = 0.71
"""Below it a suggestion is another word: model_engine for search_engine, trainer for retriever."""
FEW = 30


def _listed(name: str, names: list[str], where: str) -> str:
    """The accepted names, of which a long list has the nearest alone, because it would hide the sentence before it."""
    if len(names) <= FEW:
        return f"accepted{where} are {', '.join(names)}"
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    others = f"{len(names) - len(near)} {'other ' if near else ''}keys (docs/keys.md, verl's configuration)"
    return f"accepted{where} are {', '.join(near)}{' and ' if near else ''}{others}"


class PreflightError(RuntimeError):
    """The run cannot start; the message names what is missing and what would be accepted."""


class TooLargeError(PreflightError):
    """The memory that the run needs exceeds a device's."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, for example at a scheduler's time limit, ends a run as Ctrl-C does."""


class EvaluationOverrun(RuntimeError):
    """An evaluation took longer than its limit."""


class IntegrityError(RuntimeError):
    """The run's numbers could not be trusted if it went on."""
