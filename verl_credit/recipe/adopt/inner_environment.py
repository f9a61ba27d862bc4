"""The environment of a shell that programs start: some hand on their own, some clear it, some keep what they are told."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence

CONTAINERS, SLURM = ("docker", "podman", "kubectl"), ("srun", "sbatch", "salloc")
CLEAR = (*CONTAINERS, "ssh", "sudo")
"""Programs that start a shell in which the script's variables are not set."""
_TAKES = {
    "env": "-u(.*)|--unset(?:=(.*))?",
    **dict.fromkeys(CONTAINERS, "-[dit]*e(.*)|--env(?:=(.*))?"),
    **dict.fromkeys(SLURM, "--export(?:=(.*))?"),
}
"""The option of a program whose value names variables."""
_CLEARS = {"env": ("-", "-i", "--ignore-environment")}
_KEEPS = {"sudo": ("-E", "--preserve-env"), "podman": ("--env-host",)}
_ONE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


def environment_of(words: Sequence[str]) -> Iterator[str]:
    """Code for a shell that starts in these words' place: it leaves the variables that they would hand on."""
    start = 0
    for n, word in enumerate([*words, "env"]):
        if n and os.path.basename(word) in (*_TAKES, *CLEAR):
            yield from _handed_on(os.path.basename(words[start]), [*words[start + 1 : n]])
            start = n


def file_of(words: Sequence[str]) -> str:
    """The file of variables that a container gets; "" where it gets none."""
    for word, value in zip(words, [*words[1:], ""], strict=True):
        if re.match(r"--env-file(=|$)", word) and any(os.path.basename(one) in CONTAINERS for one in words):
            return word.partition("=")[2] or value
    return ""


def _handed_on(name: str, rest: list[str]) -> Iterator[str]:
    clears, named, kept = name in CLEAR, [], ["PATH", "HOME", "BASH_ENV"]
    while rest:
        word = rest.pop(0)
        clears = (clears or word in _CLEARS.get(name, ())) and word not in _KEEPS.get(name, ())
        if match := re.fullmatch(_TAKES.get(name, "(?!)"), word, re.DOTALL):
            value = "".join(filter(None, match.groups())) or (rest.pop(0) if rest else "")
            items = value.split(",") if name in SLURM else [value]
            clears |= name in SLURM and "ALL" not in items
            named += items
        elif _ONE.match(word):
            named.append(word)
    if clears:
        kept += [one for one in named if re.fullmatch(r"[A-Za-z_][\w*]*", one)]
        test = f'case $__name in {" | ".join(kept)}) ;; *) builtin export -n "$__name" ;; esac'
        yield f"for __name in $(builtin compgen -e); do {test}; done"
    for one in named:
        if match := _ONE.fullmatch(one):
            yield f"builtin export {match[1]}={shlex.quote(match[2])}"
        elif name == "env":
            yield f"builtin export -n {shlex.quote(one)}"
