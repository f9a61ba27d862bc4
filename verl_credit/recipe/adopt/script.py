"""Reads the launch of verl's trainer in a shell script: variables, arrays, quotes, arithmetic. Nothing is executed.

Assignments inside `if`, `case`, loops and functions are not applied, because nothing here decides which of them run.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from verl_credit.errors import ConfigError
from verl_credit.recipe.adopt.lexer import NAME, Word, commands, expansion_end

MAIN = "verl.trainer.main_ppo"
FULLY_ASYNC = "verl.experimental.fully_async_policy.fully_async_main"
LAUNCHES = (MAIN, FULLY_ASYNC)
_ASSIGNS = re.compile(rf"({NAME})(\+?)=", re.DOTALL)
_BRACED = re.compile(rf"(#?)({NAME}|[\d@*]+)(\[[@*\d]+\])?(?:(:?[-=?+])(.*))?", re.DOTALL)
OPENS, SHUTS = ("if", "case", "for", "while", "until", "select", "{"), ("fi", "esac", "done", "}")
SKIPPED = (
    "then", "else", "elif", "do", "export", "declare", "local", "readonly", "!", "time", "exec", "set", "typeset",
)  # fmt: skip
HERE = ("pwd", "pwd -P")
_ARITHMETIC: dict[type[ast.AST], Callable[..., int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod,
    ast.Div: operator.floordiv, ast.FloorDiv: operator.floordiv, ast.USub: operator.neg,
}  # fmt: skip


class Unknown(Exception):
    """A value that only a run of the script would know."""


class Launch(NamedTuple):
    entry: str
    arguments: list[str]
    """The words after the entry point, as the shell would hand them on."""
    unknown: dict[str, str]
    """An argument as the script writes it, and the reason why its value is not known."""


class _Shell:
    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.values: dict[str, str | list[str]] = {}
        self.unknown: dict[str, str] = {}

    def assign(self, word: Word) -> None:
        match = _ASSIGNS.match(word.parts[0].text)
        if match is None:
            return
        name, appends = match[1], match[2]
        try:
            if word.items is not None:
                items = [text for item in word.items for text in self.expand(item)]
                before = self.values.get(name, []) if appends else []
                self.values[name] = [*([before] if isinstance(before, str) else before), *items]
                return
            rest = word.parts[0]._replace(text=word.parts[0].text[match.end() :])
            value = self._text(Word((rest, *word.parts[1:])))
            self.values[name] = str(self.values.get(name, "")) + value if appends else value
        except Unknown as error:
            self.values.pop(name, None)
            self.unknown[name] = str(error)

    def expand(self, word: Word) -> list[str]:
        """The words that the shell would make of one. Raises Unknown."""
        if len(word.parts) == 1 and word.parts[0].quote != "'":
            text = word.parts[0].text
            array = re.fullmatch(rf"\$\{{({NAME})\[[@*]\](?:\+.*)?\}}", text)
            if array and array[1] not in self.unknown:
                value = self.values.get(array[1], [])
                return [value] if isinstance(value, str) else list(value)
            if text in ("$@", "${@}", "$*", "${@:2}"):
                return []
            if not word.parts[0].quote and re.fullmatch(rf"\$\{{?{NAME}\}}?", text):
                return self._text(word).split()
        return [self._text(word)]

    def _text(self, word: Word) -> str:
        return "".join(p.text if p.quote == "'" else self._expanded(p.text) for p in word.parts)

    def _expanded(self, text: str) -> str:
        found, at = "", 0
        while at < len(text):
            if text[at : at + 2] == "\\$":
                found, at = found + "$", at + 2
            elif text[at] in "$`" and (end := expansion_end(text, at)) > at + 1:
                found, at = found + self._expansion(text[at:end]), end
            else:
                found, at = found + text[at], at + 1
        return found

    def _expansion(self, written: str) -> str:
        if written.startswith("$(("):
            return str(self._number(written[3:-2]))
        if written.startswith(("$(", "`")):
            run = written.strip("$`()").strip()
            if run in HERE:
                return self.environment.get("PWD", ".")
            raise Unknown(f"it is the output of `{run}`")
        return self._variable(written[2:-1] if written.startswith("${") else written[1:])

    def _variable(self, written: str) -> str:
        match = _BRACED.fullmatch(written)
        if match is None or match[1]:
            raise Unknown(f"${{{written}}} is not read here")
        _, name, index, use, default = match.groups()
        value = self.values.get(name)
        if isinstance(value, list):
            place = int(index[1:-1]) if index and index[1:-1].isdigit() else None
            value = " ".join(value) if place is None else (value[place] if place < len(value) else None)
        if value is None and name in self.unknown and name not in self.environment:
            raise Unknown(f"{name}: {self.unknown[name]}")
        if value is None:
            value = self.environment.get(name)
        if use and use.endswith("+"):
            return self._expanded(default) if value else ""
        if value is None or (use and use.startswith(":") and value == ""):
            if use and use[-1] in "-=":
                return self._expanded(_unquoted(default))
            if name.isdigit() or name in "@*#":
                return ""
            raise Unknown(f"{name} is set neither in the script nor in the environment")
        return value

    def _number(self, text: str) -> int:
        """The value of an arithmetic expression. Bash sees names without a dollar there, too."""
        text = re.sub(rf"(?<![\w$]){NAME}", lambda name: self._variable(name[0]), self._expanded(text))
        try:
            return _evaluated(ast.parse(f"({text.strip()})", mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError) as error:
            raise Unknown(f"`{text.strip()}` is not read here") from error


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def _evaluated(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _ARITHMETIC[type(node.op)](_evaluated(node.left), _evaluated(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _ARITHMETIC:
        return _ARITHMETIC[type(node.op)](_evaluated(node.operand))
    raise ValueError(ast.dump(node))


def read_script(text: str, name: str, environment: Mapping[str, str]) -> Launch:
    """The first launch of verl's trainer in the script. Raises ConfigError for a script without one."""
    shell, depth = _Shell(environment), 0
    others: list[str] = []
    for command in commands(text):
        words = list(command)
        while words and words[0].plain in (*OPENS, *SHUTS, *SKIPPED):
            depth += (words[0].plain in OPENS) - (words[0].plain in SHUTS)
            words = words[1:]
        assigned = 0
        while assigned < len(words) and words[assigned].parts and _assigns(words[assigned]):
            assigned += 1
        if assigned == len(words):
            for word in words if depth <= 0 else ():
                shell.assign(word)
            continue
        launch = _launch(shell, words[assigned:], others)
        if launch is not None:
            return launch
    found = f"it starts {', '.join(dict.fromkeys(others))}" if others else "it starts no module of Python"
    use = f"no launch of {MAIN} is in it ({found}); adopt reads a script with `python -m {MAIN} KEY=VALUE...`"
    raise ConfigError(f"{name}: {use}", key="--from", value=name)


def _assigns(word: Word) -> bool:
    return not word.parts[0].quote and _ASSIGNS.match(word.parts[0].text) is not None


def _launch(shell: _Shell, words: Iterable[Word], others: list[str]) -> Launch | None:
    arguments: list[tuple[str, str | None]] = []
    unknown: dict[str, str] = {}
    for word in words:
        try:
            arguments += [(text, None) for text in shell.expand(word)]
        except Unknown as error:
            arguments.append((_as_written(word), str(error)))
    place = next((n for n, module in _modules(arguments) if module in LAUNCHES), None)
    if place is None:
        others += [module for _, module in _modules(arguments)]
        return None
    entry = next(module for n, module in _modules(arguments) if n == place)
    kept = []
    for text, why in arguments[place + 1 :]:
        if re.fullmatch(r"\d?>>?.*|<.*", text):
            break
        if why is None:
            kept.append(text)
        else:
            unknown[text] = why
    return Launch(entry, [text for text in kept if text not in ("", "2")], unknown)


def _modules(arguments: list[tuple[str, str | None]]) -> Iterator[tuple[int, str]]:
    for n, (text, _) in enumerate(arguments):
        if n and arguments[n - 1][0] == "-m" and re.fullmatch(r"[\w.]+", text):
            yield n, text
        elif text.endswith(".py") and "=" not in text and "/" in text:
            parts = text.removesuffix(".py").split("/")
            yield n, ".".join(parts[parts.index("verl") :] if "verl" in parts else parts[-1:])


def _as_written(word: Word) -> str:
    return "".join(part.text for part in word.parts)
