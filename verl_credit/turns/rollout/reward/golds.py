"""The gold answers of a row: one reader for `prepare`, the checks before a start, and the reward.

Files of the field hold several answers, or a number, in one field in many forms. A form is decoded where it can mean one
thing only:

- text; a number as it would be written (42.0 is "42", 1e3 is "1000", 42.5 stays); a list of these;
- a mapping with one of the keys ``MAIN``, beside it ``aliases`` and ``normalized_aliases``: verl's ``{target}``, SQuAD's
  ``{text, answer_start}``, TriviaQA's ``{value, aliases, normalized_aliases}``;
- text that is a list or such a mapping as JSON, Python or numpy writes it, with at least one quoted text in it
  (``["a", "b"]``, ``['a', 'b']``, ``['a' 'b']``, ``array(['a'], dtype=object)``), and answers joined by ``SPLIT``.

Null and not-a-number are missing, and blank text is no answer. Anything else in text is an answer as it stands: "[sic]",
"(1995)", "{}", "[0, 1]", "A|B test". `doubt` says which of them look like several answers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from numbers import Real

from verl_credit.turns.rollout.reward.literal import NotALiteral, literal

MAIN = ("target", "value", "text", "answer", "answers", "ground_truth", "golden_answers")
"""A mapping of answers has one of these keys; ``target`` goes before the others, which verl's rows may have too."""
ALIASES = ("aliases", "human_answers", "humananswers")
NORMALISED = ("normalized_aliases", "normalizedaliases")
SPLIT = "<|answer_split|>"
DEEPEST = 6

# A bracket and the text in it: no other text begins so.
_LIST = re.compile(
    rf"""(?:array\()?\[[\[\s]*b?["']|\{{\s*["'](?:{"|".join((*MAIN, *ALIASES))})["']\s*:""", re.IGNORECASE
)
_LIKE = re.compile(r"""[\[({]\s*(?:(?:"[^"]*"|'[^']*')\s*[,:]|(?:"[^"]*|'[^']*)\Z)""")
_BYTES = re.compile(r"""b(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')""", re.DOTALL)
_JOINED = re.compile(r"\S\s*?(\|\|\||</s>|\[SEP\]|[|;\t\n])\s*\S")
_MISSING = ("nan", "NaN", "None", "null", "NULL", "NaT", "<NA>")
_FLOAT = re.compile(r"[-+]?\d+\.0+")


def gold_answers(ground_truth) -> list[str]:
    """All aliases from a row's ``reward_model.ground_truth``: ``{"target": [..]}``, a list, or one answer.

    Raises ValueError without a usable gold answer, and for a form that cannot be read with certainty: such a row would
    teach the policy that every answer is wrong.
    """
    why = ""
    try:
        golds = [text for text in texts_of(ground_truth) if text.strip()]
    except ValueError as error:
        golds, why = [], f"; {error}"
    if not golds:
        shown = repr(ground_truth)
        raise ValueError(
            f"reward_model.ground_truth is {shown if len(shown) <= 200 else shown[:200] + '..'}: expected "
            f"{{'target': [gold, ...]}} with at least one non-empty gold answer, text or number{why}"
        )
    return golds


def texts_of(value: object, depth: int = 0) -> list[str]:
    """Every answer in a field as text; a blank one is blank text, a missing one is nothing.

    Raises ValueError with the value and what would be right where the form is not certain.
    """
    if depth > DEEPEST:
        raise ValueError(f"it is nested more than {DEEPEST} deep; expected a list of answers")
    value = decoded(value)
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if isinstance(value, Real | Decimal) and not isinstance(value, bool):
        exact = Decimal(str(value))
        if exact.is_nan() or exact.is_finite():
            return [] if exact.is_nan() else [_plain(exact)]
    if isinstance(value, Mapping):
        written, derived = of_mapping(value, depth)
        known = {text.casefold() for text in written}
        return written + [text for text in derived if text.casefold() not in known]
    if (
        not isinstance(value, Iterable)
        or isinstance(value, bytes | bytearray)
        or getattr(value, "ndim", 1) == 0  # a scalar of numpy
    ):
        raise ValueError(f"{value!r:.80} is neither text nor a finite number; write the answer as text")
    members = [texts_of(member, depth + 1) for member in value]
    held = [member for member in members if member]
    if len(held) > 1 and any(len(set(member)) > 1 for member in held):
        raise ValueError(
            f"{value!r:.80} lists several lists: aliases of one answer stand in one list, and a question with several "
            "answers that all have to be given cannot be scored"
        )
    return [text for member in members for text in member]


def of_mapping(value: Mapping, depth: int = 0) -> tuple[list[str], list[str]]:
    """(the answers, a release's normalised copies of them) from a mapping. Raises ValueError for another mapping."""
    held = {str(key).lower(): entry for key, entry in value.items() if entry is not None}
    main = ["target"] if "target" in held else [key for key in MAIN if key in held]
    others = [key for key in ALIASES if key in held]
    if len(main) > 1 or not (main or others):
        has = "several" if main else "none"
        raise ValueError(
            f"{dict(value)!r:.80} has {has} of the keys {', '.join((*MAIN, 'aliases'))}; expected one"
        )
    written, derived = (
        [text for key in keys for text in texts_of(held[key], depth + 1)]
        for keys in (main + others, [key for key in NORMALISED if key in held])
    )
    return written, derived


def decoded(value: object) -> object:
    """The list or mapping that text certainly is; any other value as it is.

    Raises ValueError for text that begins as a list of quoted texts does and is not one (cut off, a quote too many), and
    for the text of Python's bytes.
    """
    if not isinstance(value, str):
        return value
    text = value.strip()
    if SPLIT in text:
        return text.split(SPLIT)
    if _BYTES.fullmatch(text):
        raise ValueError(f"{value!r:.80} is Python's text of bytes; write the text itself")
    if not text.startswith(("[", "(", "{", "array(")):
        return value
    try:
        found, quoted = literal(text)
    except NotALiteral as error:
        if _LIST.match(text):
            raise ValueError(
                f"{value!r:.80} begins as a list of answers does and cannot be read as one ({error}); write a list, "
                "or the answer without brackets"
            ) from None
        return value
    if isinstance(found, dict):
        return found if {str(key).lower() for key in found} & {*MAIN, *ALIASES} else value
    if text[0] == "[" and all(member in (None, []) for member in found):
        raise ValueError(f"{value!r:.80} is a list without an answer in text")
    return found if quoted else value


def doubt(gold: str, *, number: bool = False) -> str:
    """What makes a gold answer look like something else; "" for most. It is compared as it stands all the same.

    ``number``: the answer is mathematics, in which a bar, a semicolon and brackets have a meaning.
    """
    text = gold.strip()
    joined = next((mark for mark in _JOINED.findall(text) if not number or len(mark) > 1), "")
    if joined:
        return f"several answers joined by {joined!r}"
    if number:
        return ""
    around = text[:1] + text[-1:]
    if (around == "[]" and "," in text) or (around == "{}" and ":" in text) or _LIKE.match(text):
        return "a list or an object in text"
    if text in _MISSING:
        return "a missing value in text"
    return "a number that was written as a float" if _FLOAT.fullmatch(text) else ""


def _plain(number: Decimal) -> str:
    text = f"{number:f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return text if number else "0"
