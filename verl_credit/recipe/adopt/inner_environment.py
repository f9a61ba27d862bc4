"""The environment of a shell that programs start: some hand on their own, some clear it, some keep what they are told."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, takewhile

from verl_credit.recipe.adopt.spelled import CONTAINERS, options_of

SLURM, IMAGES = ("srun", "sbatch", "salloc"), ("apptainer", "singularity")
CLEAR = (*CONTAINERS, "kubectl", "ssh", "sudo")
"""Programs that start a shell in which the script's variables are not set."""
_TAKES = {
    "env": "-u(.*)|--unset(?:=(.*))?",
    **dict.fromkeys(CONTAINERS, "-[dit]*e(.*)|--env(?:=(.*))?"),
    **dict.fromkeys(SLURM, "--export(?:=(.*))?"),
    **dict.fromkeys(IMAGES, "--env(?:=(.*))?"),
}
"""The option of a program whose value names variables."""
_CLEARS = dict.fromkeys(IMAGES, "-[a-z]*[eC]|--(cleanenv|containall)") | {"env": "-|-[a-z]*i|--ignore-env.*"}
_KEEPS = {"sudo": "-E|--preserve-env", "podman": "--env-host"}
EXPORTS = {"srun": "SLURM_EXPORT_ENV", "sbatch": "SBATCH_EXPORT"}
"""The variable that stands for the option ``--export`` of a program where it is not given."""
BASE = ("PATH", "HOME", "USER", "SHELL", "LOGNAME")
"""The variables that a batch script gets whatever ``--export`` says."""
_WORD = re.compile(r"""(?:[^\s"']|"[^"]*"|'[^']*')+""")
_ONE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


def environment_of(words: Sequence[str]) -> Iterator[str]:
    """Code for a shell that starts in these words' place: it leaves the variables that they would hand on."""
    start = 0
    yield "IFS=$' \\t\\n'"
    for n, word in enumerate([*words, "env"]):
        if n and os.path.basename(word) in (*_TAKES, *CLEAR):
            yield from _handed_on(os.path.basename(words[start]), [*words[start + 1 : n]])
            start = n


def directive_of(text: str) -> tuple[int, str]:
    """(the line, the value) of `#SBATCH --export` before a batch script's first command; (0, "") where none is."""
    found = (0, "")
    for n, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            break
        parts = _WORD.findall(line.removeprefix("#SBATCH")) if re.match(r"#SBATCH\s", line) else []
        words = [*takewhile(lambda one: not one.startswith("#"), parts), ""]
        for word, value in pairwise(words):
            if match := re.fullmatch("--export(?:=(.*))?", word):
                found = n, re.sub("[\"']", "", value if match[1] is None else match[1])
    return found


def batch(environment: Mapping[str, str], export: str) -> dict[str, str]:
    """The environment of a batch script with this value of ``--export``."""
    items = export.split(",")
    kept = {*environment} if "ALL" in items else {*BASE, *items}
    found = {name: text for name, text in environment.items() if name in kept}
    return found | dict(one.split("=", 1) for one in items if "=" in one) | {"SLURM_EXPORT_ENV": export}


def _handed_on(name: str, rest: list[str]) -> Iterator[str]:
    clears, named, kept = name in CLEAR, [], ["PATH", "HOME", "BASH_ENV"]
    if name == "env":  # what follows its options and assignments is another program's
        own = sum(map(len, options_of(rest, name)))
        rest = [*rest[:own], *takewhile(_ONE.match, rest[own:])]
    while rest:
        word = rest.pop(0)
        clears |= re.fullmatch(_CLEARS.get(name, "(?!)"), word) is not None
        clears &= re.fullmatch(_KEEPS.get(name, "(?!)"), word) is None
        if match := re.fullmatch(_TAKES.get(name, "(?!)"), word, re.DOTALL):
            value = "".join(filter(None, match.groups())) or (rest.pop(0) if rest else "")
            items = value.split(",") if name in (*SLURM, *IMAGES) else [value]
            clears |= name in SLURM and "ALL" not in items
            named += [*items, f"SLURM_EXPORT_ENV={value}"] if name == "sbatch" else items
        elif _ONE.match(word):
            named.append(word)
    if name in IMAGES:
        yield '__own="$(builtin compgen -e APPTAINERENV_) $(builtin compgen -e SINGULARITYENV_)"'
    if clears:
        kept += [one for one in named if re.fullmatch(r"[A-Za-z_][\w*]*", one)]
        test = f'case $__name in {" | ".join(kept)}) ;; *) builtin export -n "$__name" ;; esac'
        yield f"for __name in $(builtin compgen -e); do {test}; done"
    if name in IMAGES:
        yield 'for __name in $__own; do builtin export "${__name#*ENV_}=${!__name}"; done'
    for one in named:
        if match := _ONE.fullmatch(one):  # an array is not handed on
            yield f"builtin unset {match[1]}; builtin export {match[1]}={shlex.quote(match[2])}"
        elif name == "env":
            yield f"builtin export -n {shlex.quote(one)}"
