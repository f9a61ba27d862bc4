"""The programs that a script would start, and the shells that stand in their words."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

SHELLS = ("bash", "sh", "zsh", "dash", "ksh")
SCRIPTS = (".sh", ".slurm", ".sbatch")
ELSEWHERE = ("docker", "podman", "ssh", "kubectl")
"""Programs that start a shell on a machine where the script's variables are not set."""
SILENT = ("mkdir", "touch", "rm", "rmdir", "cp", "mv", "ln", "chmod", "chown", "sleep", "pkill", "module")
"""Programs that print nothing where they succeed."""
_ELSEWHERE = (
    "for __name in $(builtin compgen -e); do case $__name in PATH | HOME | BASH_ENV) ;; "
    '*) builtin unset -v "$__name" ;; esac; done'
)
PYTHON = re.compile(r"\b(?:python|torchrun)\S*\s")


@dataclass(frozen=True)
class Program:
    words: list[str]
    line: int
    order: int
    """The place of its command among all that start programs: what runs in the background is noted in any order."""
    unknown: dict[str, str] = field(default_factory=dict)
    """A word, as bash expands it, and why its value is not known."""
    doubtful: tuple[tuple[str, str], ...] = ()
    """Keys that a line sets which does not surely run, and why."""


def shell_in(words: list[str]) -> str:
    """The code that starts the shell which stands in the words of a program; "" where none does."""
    name = os.path.basename(words[0])
    if name.endswith(".sh"):
        words = ["bash", *words]
    place = next((n for n, word in enumerate(words) if os.path.basename(word) in SHELLS), None)
    texts = [word for word in words[1:] if PYTHON.search(word)]
    files = [n for n, word in enumerate(words) if n and word.endswith(SCRIPTS)]
    if place is not None:
        rest, kept = words[place + 1 :], ""
        while rest and rest[0][:1] in ("-", "+"):
            option = rest.pop(0)
            if not option.startswith("--"):
                kept += "".join(letter for letter in option if letter in "cs")
                rest = rest[option.endswith("o") :]
        rest = [*[f"-{kept}"] * bool(kept), *rest]
    elif name.startswith(("python", "git", "echo")) or not (texts or (name == "sbatch" and files)):
        return ""
    else:
        rest = ["-c", texts[-1].removeprefix("--wrap=")] if texts else words[files[0] :]
    alone = name == "env" and {"-i", "-", "--ignore-environment"} & {*words}
    clears = [_ELSEWHERE + ";"] * bool(name in ELSEWHERE or alone)
    dropped = [word for before, word in pairwise(words) if name == "env" and before == "-u"]
    clears += [f"builtin unset -v {shlex.quote(word)};" for word in dropped]
    return " ".join(["(", *clears, *_given(words), '"$BASH"', shlex.join(rest), ")"])


def _given(words: list[str]) -> Iterator[str]:
    """The assignments that a program hands on to its shell, as `env`, `--export=`, `--env` and `-e` have them."""
    for word in words[1:]:
        if os.path.basename(word) in SHELLS or PYTHON.search(word):
            return
        for one in (
            re.sub("^--(export|env)=", "", word).split(",") if word.startswith("--export=") else [word]
        ):
            if match := re.match(r"(?:--env=)?([A-Za-z_]\w*)=(.*)", one, re.DOTALL):
                yield f"{match[1]}={shlex.quote(match[2])}"
