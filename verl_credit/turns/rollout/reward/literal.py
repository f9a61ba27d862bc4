"""Lists and mappings that stand in text as JSON, Python or numpy writes them, read without evaluating anything."""

from __future__ import annotations

import ast
import json
import re
import warnings

DEEPEST = 5

_TEXT = r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\''
_TOKEN = re.compile(
    rf"(?P<text>{_TEXT})(?P<next>\s*(?=[\"']))?|(?P<word>\b(?:null|nan|NaN|true|false|array)\b|,\s*dtype=(?:{_TEXT}|\w+))",
    re.DOTALL,
)
_WORDS = {"null": "None", "nan": "None", "NaN": "None", "true": "True", "false": "False"}


class NotALiteral(ValueError):
    """The text is no list and no mapping; the message has the reason."""


def literal(text: str) -> tuple[list | dict, int]:
    """(the list or mapping, how many quoted texts are in it). Raises NotALiteral.

    Members of a list are separated by commas, or texts by blanks as numpy does. Round and curly brackets are a list where
    they hold two quoted texts or more and nothing else.
    """
    try:
        value = json.loads(text, object_pairs_hook=_mapping, parse_constant=_constant)
    except NotALiteral:
        raise
    except (ValueError, RecursionError):
        value = _of_python(text)
    if not isinstance(value, list | dict):
        raise NotALiteral("it is no list")
    return value, _quoted(value, 0)


def _of_python(text: str) -> object:
    blanks = 0

    def written(found: re.Match) -> str:
        nonlocal blanks
        if word := found["word"]:
            return _WORDS.get(word, "")  # "array" and its dtype go, and leave a list in brackets
        if found["next"] is None:
            return found["text"]
        if not found["next"]:
            raise NotALiteral("two texts without a comma or a blank between them")
        blanks += 1
        return f"{found['text']},"

    plain = _TOKEN.sub(written, text)
    if blanks and (text[0] != "[" or _TOKEN.sub("", text).count(",")):
        raise NotALiteral("a comma is missing")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of an escape that it does not know
            return _value(ast.parse(plain, mode="eval").body)
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise NotALiteral(f"{type(error).__name__}: {error}"[:200]) from None


def _value(node: ast.expr | None) -> object:
    match node:
        case ast.List(elts=members):
            return [_value(member) for member in members]
        case ast.Tuple(elts=members) | ast.Set(elts=members):
            values = [_value(member) for member in members]
            if len(values) < 2 or not all(isinstance(value, str) for value in values):
                raise NotALiteral("brackets that are no list")
            return values
        case ast.Dict(keys=keys, values=values):
            return _mapping(list(zip(map(_value, keys), map(_value, values), strict=True)))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Constant(value=None | str() | int() | float() as value):
            return value
    raise NotALiteral("something in it is no text, number, list or mapping")


def _mapping(pairs: list[tuple[object, object]]) -> dict:
    found = dict(pair for pair in pairs if isinstance(pair[0], str))
    if len(found) < len(pairs):
        raise NotALiteral("a key that is no text, or occurs twice")
    return found


def _constant(word: str) -> None:
    if word != "NaN":
        raise NotALiteral(f"{word} in it")


def _quoted(value: object, depth: int) -> int:
    """The number of texts in the value. Raises NotALiteral for deep nesting and for a text that was not written so."""
    if depth > DEEPEST + 1:
        raise NotALiteral(f"nested more than {DEEPEST} deep")
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return sum(_quoted(member, depth + 1) for member in value)
    if not isinstance(value, str):
        return 0
    # LaTeX whose backslashes were not doubled: "\frac" would become a form feed and "rac".
    if any(ord(character) < 32 or "\ud800" <= character < "\ue000" for character in value.rstrip("\n")):
        raise NotALiteral("an escape that gives a control character or half of a character")
    return 1
