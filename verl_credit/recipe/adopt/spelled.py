"""The words of a program with the shell that it makes of them: ssh joins them, docker has an entry point, flock a text."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence

SHELLS = ("bash", "sh", "zsh", "dash", "ksh")
CONTAINERS = ("docker", "podman", "nerdctl", "docker-compose", "nvidia-docker")
_LETTERS = {
    "ssh": "BbcDEeFIiJLlmOoPpQRSWw", "env": "CSu", "script": "BEImOoT", "flock": "Ew", "su": "Ggsuw",
    "runuser": "Ggsuw", "screen": "cehpsStT",
}  # fmt: skip
"""The options of a program with a value, which is the rest of the option's word, or else the next word."""
_LONG = (
    "--(split-string|unset|chdir|log-.*|logging-format|output-limit|echo|timeout|wait|conflict-exit-code|user|group|"
    "supp-group|shell|whitelist-environment)"
)
_CONTAINER = (
    r"(?!-[ditqPT]+\Z|-[dit]*[^-ditqPT].|--.*=|--(rm|privileged|init|detach|interactive|tty|read-only|quiet.*|no-.*|build|"
    r"publish-all|service-ports|use-aliases|remove-orphans|env-host|replace|rmi|oom-kill-disable)\Z).*"
)
"""An option of `docker run` whose value is the next word."""


def spelled(words: Sequence[str]) -> list[str]:
    """The words with the shell that they mean: `ssh HOST cd /x` becomes `ssh HOST bash -c 'cd /x'`."""
    for n, word in enumerate(words):
        name, rest, made = os.path.basename(word), [*words[n + 1 :]], None
        if name in SHELLS or name.startswith("python"):
            break
        if name == "ssh":
            at = _length(options_of(rest, name)) + 1
            at += _length(options_of(rest[at:], name))
            made = [*rest[:at], "bash", *(["-c", " ".join(rest[at:])] if rest[at:] else ["-s"])]
        elif name == "env":
            made = _split(rest)
        elif name in CONTAINERS and "run" in rest:
            start, program, kept = rest.index("run") + 1, "", []
            options = options_of(rest[start:], name)
            for one in options:
                if one[0].partition("=")[0] == "--entrypoint":
                    program = "=".join(one).partition("=")[2]
                else:
                    kept += one
            image, given = rest[(at := start + _length(options)) : at + 1], rest[at + 1 :]
            made = [*rest[:start], *kept, *image, program, *given] if program else None
        elif name == "tmux" and rest[:1] in (["send-keys"], ["send"]):
            texts = [one for one in rest if re.search(r"\s|\.sh$", one)]
            made = [rest[0], "bash", "-c", "; ".join(texts)] if texts else None
        elif name in _LETTERS and (text := re.sub(r"(\\n|\\r|\\01[25]|\^M|\s)+$", "", _text(rest, name))):
            made = [*["stuff"] * (name == "screen"), "bash", "-c", text]
        if made is not None:
            return [*words[: n + 1], *spelled(made)]
    return [*words]


def options_of(words: list[str], name: str) -> list[list[str]]:
    """The options of the program at the beginning, each with its words."""
    letters = _LETTERS.get(name)
    valued, found, at = rf"-[^\W{letters}]*[{letters}]|{_LONG}" if letters else _CONTAINER, [], 0
    while words[at : at + 1] and words[at].startswith("-") and ["--"] not in found:
        found.append(words[at : at + 1 + (re.fullmatch(valued, words[at], re.DOTALL) is not None)])
        at += len(found[-1])
    return found


def _length(options: list[list[str]]) -> int:
    return sum(map(len, options))


def _split(rest: list[str]) -> list[str] | None:
    """The words of `env -S TEXT`, which env splits; None where it has no text, or one whose variables it expands."""
    options = options_of(rest, "env")
    for n, one in enumerate(options):
        match = re.fullmatch(r"(-[^\WCSu]*)S(.*)|--split-string=?(.*)", "".join(one), re.DOTALL)
        if match and not re.search(r"[$\\]", text := match[2] or match[3] or ""):
            flags = [match[1]] if match[1] not in (None, "-") else []
            try:
                words = shlex.split(text)
            except ValueError:  # an open quote, with which env starts nothing
                return None
            return [*rest[: _length(options[:n])], *flags, *words, *rest[_length(options[: n + 1]) :]]
    return None


def _text(rest: list[str], name: str) -> str:
    """The program's text for a shell, or "". Its option stands before the second word that is no option."""
    own = rf"-[^\W{_LETTERS[name]}c]*c(.+)?|--(?:session-)?command(?:=(.*))?" if name != "screen" else "stuff"
    plain = 0
    while rest and rest[0] != "--" and plain < 2:
        if match := re.fullmatch(own, rest[0], re.DOTALL):
            return next((one for one in match.groups() if one is not None), "".join(rest[1:2]))
        options = options_of(rest, name)[:1]
        plain += not options or (name == "runuser" and re.match("-u|--user", rest[0]) is not None)
        rest = rest[_length(options) or 1 :]
    return ""
