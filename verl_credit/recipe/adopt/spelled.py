"""The words of a program with the shell that it makes of them: ssh joins them, docker has an entry point, flock a text."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

SHELLS = ("bash", "sh", "zsh", "dash", "ksh")
CONTAINERS = ("docker", "podman", "nerdctl", "docker-compose", "nvidia-docker")
_TEXT = dict.fromkeys(("script", "flock", "su", "runuser"), r"-\w*c|--command") | {"screen": "stuff"}
"""The word before a text for a shell."""
_ONE_WORD = (
    r"-[ditqP]+|-[dit]*[^-ditqP].+|--.*=.*|--(rm|privileged|init|detach|interactive|tty|read-only|quiet)"
)
"""An option of `docker run` whose value is no word of its own."""


def spelled(words: Sequence[str]) -> list[str]:
    """The words with the shell that they mean: `ssh HOST cd /x` becomes `ssh HOST bash -c 'cd /x'`."""
    for n, word in enumerate(words):
        name, rest, made = os.path.basename(word), [*words[n + 1 :]], None
        if name in SHELLS or name.startswith("python"):
            break
        if name == "ssh":
            at = _behind(rest, 0, r"-\w*[^\WBbcDEeFIiJLlmOopQRSWw]|-\w\W.*|-\w\d+") + 1
            made = [*rest[:at], "bash", *(["-c", " ".join(rest[at:])] if rest[at:] else ["-s"])]
        elif name in CONTAINERS:
            before, program, behind = _taken(rest, "--entrypoint")
            rest = [*before, *behind]
            at = _behind(rest, rest.index("run") + 1 if "run" in rest else 1, _ONE_WORD) + 1
            made = [*rest[:at], program, *rest[at:]] if program else None
        elif name == "tmux" and rest[:1] in (["send-keys"], ["send"]):
            texts = [one for one in rest if re.search(r"\s|\.sh$", one)]
            made = [rest[0], "bash", "-c", "; ".join(texts)] if texts else None
        elif name in _TEXT:
            before, text, _ = _taken(rest, _TEXT[name])
            code = re.sub(r"(\\n|\\r|\\01[25]|\^M|\s)+$", "", text)
            made = [*before, "bash", "-c", code] if text and not {*before} & {*SHELLS} else None
        if made is not None:
            return [*words[: n + 1], *spelled(made)]
    return [*words]


def _taken(words: list[str], option: str) -> tuple[list[str], str, list[str]]:
    """(what stands before the option, its value, what stands behind the value)"""
    for n, word in enumerate(words):
        if match := re.fullmatch(rf"(?:{option})(?:=(.*))?", word, re.DOTALL):
            behind = words[n + 1 :] if match[1] else words[n + 2 :]
            return words[:n], match[1] or "".join(words[n + 1 : n + 2]), behind
    return words, "", []


def _behind(words: list[str], at: int, one_word: str) -> int:
    """The place behind the options, which have their values in the next word, except for those of one word."""
    while at < len(words) and words[at].startswith("-"):
        at += 1 if re.fullmatch(one_word, words[at], re.DOTALL) else 2
    return at
