"""The programs that a script would start, and the shells that stand in their words."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field

from verl_credit.recipe.adopt.inner_environment import CLEAR, SLURM, environment_of
from verl_credit.recipe.adopt.spelled import SHELLS

SCRIPTS = (".sh", ".slurm", ".sbatch")
STARTERS = (
    *CLEAR, *SLURM, "env", "nohup", "nice", "ionice", "timeout", "setsid", "stdbuf", "time", "numactl", "taskset", "chrt",
    "flock", "mpirun", "mpiexec", "torchrun", "conda", "mamba", "micromamba", "uv", "poetry", "pixi", "ray", "xargs",
    "parallel", "apptainer", "singularity", "screen", "tmux", "script", "unbuffer", "bsub", "qsub", "nsys", "su", "runuser",
    "accelerate", "deepspeed",
)  # fmt: skip
"""Programs that start the program in their words."""
_UNSURE = (
    "tmux", "qsub", "su", "runuser", "stuff", "ray", "-iS", "-env", "-genv", "--env-var", "--runtime-env", "--env-file",
    "--export-file",
)  # fmt: skip
"""Programs and options that set or clear variables as their words do not say."""
SILENT = ("mkdir", "touch", "rm", "rmdir", "cp", "mv", "ln", "chmod", "chown", "sleep", "pkill", "module")
"""Programs that print nothing where they succeed."""
OTHER = (*SILENT, "cat", "echo", "git", "rsync", "scp", "tar")
"""Programs that do something else with a script."""
PYTHON = re.compile(r"\b(?:python|torchrun|accelerate|deepspeed)\S*\s")
_CODE = re.compile(rf"(?:^|[\s;&|(/])(?:{'|'.join(SHELLS)}|source|\.)\s|\s.*\.sh(?:\s|$)", re.DOTALL)
_HANDS = re.compile(r"(?:^| )(?:(?:--export|--env|-\w*e)[ =]?[^ =]*\x02|-\w*o ?(?i:SendEnv|SetEnv))")
"""An option with the names of variables, of which one is not known, or of which ssh's server takes some."""


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
    fork: int = 0
    """The process that the script's own shell has made for it; 0 for none."""


def in_order(programs: Iterable[Program]) -> list[Program]:
    """The programs in the script's order, in which processes start; in the background they are noted in any order."""
    found = sorted(programs, key=lambda one: one.order)
    forked = iter(sorted((one for one in found if one.fork), key=lambda one: one.fork))
    return [next(forked) if one.fork else one for one in found]


def shell_in(words: list[str], folder: str) -> str:
    """The code that starts the shell which stands in the words of a program; "" where none does."""
    names = [os.path.basename(word) for word in words]
    other = next((n for n, one in enumerate(names) if one in OTHER or one.startswith("python")), len(words))
    starts = {*names[:other]} & {*STARTERS}
    place = next((n for n, name in enumerate(names) if name in SHELLS), None)
    texts = [n for n, one in enumerate(words) if n and (PYTHON.search(one) or (starts and _CODE.search(one)))]
    files = (n for n, word in enumerate(words[:other]) if (starts or not n) and is_script(word, folder))
    file = next(files, None)
    if place is not None and (file is None or place < file):
        codes = [_options(words[place + 1 :]) or ["-s"]]
    elif file is not None:
        place, codes = file, [words[file:]]
    elif names[0].startswith(("python", "git", "echo")) or not texts:
        return ""
    else:
        place, codes = texts[0], [["-c", words[n].removeprefix("--wrap=")] for n in texts]
    shells = [f'"$BASH" {shlex.join(code)}' for code in codes]
    return f"( {'; '.join([*environment_of(words[:place]), *shells])} )"


def doubt_of(words: list[str], folder: str) -> str:
    """Why the variables of a shell in the words are not known; "" where they are."""
    first = os.path.basename(words[0])
    for n, word in enumerate(words):
        option, _, value = word.partition("=")
        if option.startswith("--") and option in _UNSURE:
            return f"takes the variables of {value or ''.join(words[n + 1 : n + 2])}, which is not read"
    known = first in (*STARTERS, *SHELLS) or first.startswith("python") or is_script(words[0], folder)
    if not known or {*map(os.path.basename, words)} & {*_UNSURE}:
        return f"starts a shell by {words[0]}, which may set or clear variables"
    return "hands on variables that are not known" if _HANDS.search(" ".join(words)) else ""


def is_script(word: str, folder: str) -> bool:
    """Is it the path of a shell script, by its ending or by the first line of the file?"""
    if re.match(r"-|.*[=:]|/usr/|/s?bin/", word):
        return False
    path = os.path.join(folder, word)
    if word.endswith(SCRIPTS) and not (re.search(r"\s", word) and not os.path.isfile(path)):
        return True
    try:
        if "/" not in word or not os.path.isfile(path):  # a pipe would wait for its writer
            return False
        with open(path, "rb") as file:
            return re.match(rb"#!.*\b(ba|z|da|k)?sh\b", file.readline(100)) is not None
    except (OSError, ValueError):
        return False


def _options(rest: list[str]) -> list[str]:
    """The arguments of a shell, without the options that decide nothing here."""
    kept = ""
    while rest and rest[0][:1] in ("-", "+"):
        option = rest.pop(0)
        if not option.startswith("--"):
            kept += "".join(letter for letter in option if letter in "cs")
            rest = rest[option.endswith("o") :]
    return [*[f"-{kept}"] * bool(kept), *rest]
