"""The launches of verl's trainer in a shell script. bash runs the script's own logic, confined, and no program of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from verl_credit.errors import ConfigError, printable
from verl_credit.recipe.adopt.dialog import Unconfined, follow
from verl_credit.recipe.adopt.entry import MAIN, is_launch
from verl_credit.recipe.adopt.inner_environment import BASE, batch, directive_of
from verl_credit.recipe.adopt.marks import MARK
from verl_credit.recipe.adopt.programs import Program, in_order
from verl_credit.recipe.adopt.unknown import Event

SECONDS = 10.0
"""How long a script may take. None of its programs runs, and bash needs a tenth of a second for most."""
MOST = 20
"""Launches of a script that are named; one that has more calls itself."""
SECOND_WAY = "`verl-credit run -- bash {name}` takes the launch over while the script runs (docs/adopt.md)"
_KEY = re.compile(r"[+~]*([\w.@/-]+)=")


@dataclass
class Launch:
    entry: str
    arguments: list[str]
    """The words after the entry point, as bash hands them on."""
    unknown: dict[str, str] = field(default_factory=dict)
    """An argument, with ? for the part that is not known, and the reason."""
    notes: list[str] = field(default_factory=list)
    line: int = 0


def read_script(name: str, environment: Mapping[str, str], number: int | None = None) -> Launch:
    """The launch of the script; the one with this number where it has several. Raises ConfigError."""
    return _chosen(name, launches_of(name, environment), number)


def launches_of(name: str, environment: Mapping[str, str]) -> list[Launch]:
    """All launches of the script, at least one, in the script's order. Raises ConfigError."""
    file = Path(name).expanduser()
    second = SECOND_WAY.format(name=name)
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"--from {name}: it cannot be read: {error}", key="--from", value=name) from error
    if match := re.search(rb"\r(\n|$)", content):
        line = content[: match.start()].count(b"\n") + 1
        use = f"line {line} ends with a carriage return, which bash reads as a part of the line; remove all of them"
        raise ConfigError(f"--from {name}: {use}", key="--from", value=name, accepted=use)
    line, export = directive_of(content.decode(errors="replace"))
    kept = ", ".join(BASE)
    by_batch = f"line {line}: sbatch hands on {kept} and what --export={export} says, and no other variable"
    try:
        found, ended = follow([str(file)], batch(environment, export) if line else environment, SECONDS)
    except Unconfined as error:
        use = f"{error}; so that the script is not read here. {second}"
        raise ConfigError(f"--from {name}: {use}", key="--from", value=name, accepted=use) from error
    late = [] if ended else [f"{name} had not ended after {SECONDS:g} s; what comes later in it was not read"]
    programs = in_order(found.programs)
    launches = [launch for program in programs for launch in _launches(program)]
    if found.unknown.branches:
        decided = f"decided by what is not known here ({found.unknown.branches[0]})"
        use = f"which launch runs is {decided}. {second}"
        raise ConfigError(f"--from {name}: {use}", key="--from", value=name, accepted=use)
    if not launches:
        last = next(iter(found.unknown.last.values()), None)  # of the script's own shell
        raise _none(name, programs, last, [*late, *found.notes])
    for launch in launches:
        launch.notes += [*[by_batch] * bool(line and "ALL" not in export.split(",")), *late, *found.notes]
    return launches


def _chosen(name: str, launches: list[Launch], number: int | None) -> Launch:
    if number is None and len(launches) == 1:
        number = 1
    if number is not None and 0 < number <= len(launches):
        return launches[number - 1]
    listed = "; ".join(f"--launch {n}: {_apart(one, launches)}" for n, one in enumerate(launches[:MOST], 1))
    listed += "; ..." * (len(launches) > MOST)
    use = f"{len(launches)} launches are in it: {listed}"
    accepted = [str(n + 1) for n in range(len(launches))]
    raise ConfigError(f"{name}: {use}", key="--launch", value=number, accepted=accepted)


def _apart(launch: Launch, launches: list[Launch]) -> str:
    """The launch's line, and the first arguments that not all launches have."""
    own = [one for one in launch.arguments if any(one not in other.arguments for other in launches)]
    return " ".join([f"line {launch.line}", *map(printable, own[:3]), *["..."] * (len(own) > 3)])


def _none(name: str, programs: list[Program], last: Event | None, notes: list[str]) -> ConfigError:
    others = dict.fromkeys(module for program in programs for _, module in _modules(program.words))
    found = f"it starts {', '.join(others) or 'no module of Python'}"
    found += ", whose arguments are not verl's keys" * bool(others)
    if last:
        found += f", and its last command is `{printable(last.text[:80])}` in line {last.line}"
    found = "; ".join([found, *notes])
    use = f"no launch of {MAIN} is in it ({found}); adopt reads a script with `python -m {MAIN} KEY=VALUE...`"
    return ConfigError(f"{name}: {use}", key="--from", value=name)


def _launches(program: Program) -> Iterator[Launch]:
    modules = [*_modules(program.words)]
    started = [(n, one) for n, one in modules if is_launch(one)]
    started += [(n, one) for n, one in modules if is_launch(one, program.words[n + 1 :])]
    place, entry = next(iter(started), (0, ""))
    if not entry:
        return
    launch = Launch(entry, [], line=program.line)
    doubtful, why = dict(program.doubtful), None
    for word in program.words[place + 1 :]:
        key = match[1] if (match := _KEY.match(word)) else ""
        if why and word and not key and word[0] not in "-+~" and word not in program.unknown:
            continue  # the rest of a value that is not known
        why = program.unknown.get(word) or doubtful.pop(key, None)
        if why:
            launch.unknown[MARK.sub("?", word) if word.strip("\x02\x030123456789") else "an argument"] = why
        elif word:
            launch.arguments.append(word)
    launch.unknown |= {f"{key}=?": why for key, why in doubtful.items()}
    yield launch


def _modules(words: list[str]) -> Iterator[tuple[int, str]]:
    """The modules and files of Python that a command starts, with their places."""
    for n, text in enumerate(words):
        after = re.fullmatch(r"-[a-zA-Z]*m|--module", words[n - 1]) if n else None
        if match := re.fullmatch(r"-[a-zA-Z]*m(\w*\..+)", text):
            yield n, match[1]
        elif re.fullmatch(r"[\w.]+", text) and (
            after or ({"-m", "--module"} & {*words[:n]} and is_launch(text))
        ):
            yield n, text
        elif n and text.endswith(".py") and "=" not in text:
            parts = text.removesuffix(".py").split("/")
            verl = len(parts) - 1 - parts[::-1].index("verl") if "verl" in parts else -1
            yield n, ".".join(parts[verl:]) if verl >= 0 else os.path.basename(text)
