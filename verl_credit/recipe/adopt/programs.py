"""The programs that a script would start, and the shells that stand in their words."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass, field

SHELLS = ("bash", "sh", "zsh", "dash", "ksh")
ELSEWHERE = ("docker", "podman", "ssh", "kubectl")
"""Programs that start a shell on a machine where the script's variables are not set."""
SILENT = ("mkdir", "touch", "rm", "rmdir", "cp", "mv", "ln", "chmod", "chown", "sleep", "pkill", "module")
"""Programs that print nothing where they succeed."""
_ELSEWHERE = 'builtin command -p env -i "PATH=$PATH" "BASH_ENV=$BASH_ENV" "HOME=$HOME" "$BASH"'
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
    files = [n for n, word in enumerate(words) if n and word.endswith((".sh", ".slurm", ".sbatch"))]
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
    return " ".join([_ELSEWHERE if name in ELSEWHERE else '"$BASH"', shlex.join(rest)])
