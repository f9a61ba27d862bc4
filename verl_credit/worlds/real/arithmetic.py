r"""Arithmetic questions for a policy with trained weights of about 135 M parameters.

A question has one operation on small numbers; the answer is a number in ``\boxed{...}``. The prompt has two worked examples
as earlier turns of the chat, after which about half of this policy's answers are right (almost none without). The examples
begin with a strategic gram, because otherwise the policy writes none, and SEPA needs planning tokens.
"""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet

from verl_credit.turns.rollout.reward.qa import BOXED
from verl_credit.worlds.data.catalogue import DataSet
from verl_credit.worlds.data.output import SCHEMA, to_row
from verl_credit.worlds.data.records import Record

ARITHMETIC = DataSet("arithmetic", form=BOXED, ability="math")
EXAMPLES = (("7 + 5", 12), ("8 - 6", 2), ("3 * 4", 12), ("2 + 6", 8))  # no question is among them
WORKED = (EXAMPLES[0], EXAMPLES[2])
_DIGITS, _TO_12, _TO_20, _TO_25 = (range(2, end + 1) for end in (9, 12, 20, 25))


def make_records(seed: int, count: int) -> list[Record]:
    """``count`` different questions in an order that depends on ``seed`` only: sums, differences and products.

    Summands are 2 to 25; factors are 2 to 20, one of them at most 9; differences are 2 to 12, subtrahends 2 to 9. The worked
    examples are not among the questions.
    """
    problems = _problems()
    random.Random(seed).shuffle(problems)
    return [Record(f"What is {text}?", [str(answer)], id=text) for text, answer in problems[:count]]


def write_arithmetic(folder: Path | str, seed: int = 0, train: int = 600, test: int = 256) -> None:
    """Writes ``train.parquet`` and ``test.parquet`` in the form of `verl_credit.worlds.data.output`.

    A question and the one with its numbers exchanged are in the same file, because 8 + 3 in train would reveal 3 + 8.
    """
    every = make_records(seed, len(_problems()))
    pairs: dict[tuple[str, ...], list[Record]] = {}
    for record in every:
        first, sign, second = record.id.split()
        pair = (first, sign, second) if sign == "-" else (sign, *sorted((first, second)))
        pairs.setdefault(pair, []).append(record)
    held_out, rest = [], []
    for pair in pairs.values():
        (held_out if len(held_out) + len(pair) <= test else rest).extend(pair)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for split, part in (("train", rest[:train]), ("test", held_out)):
        rows = [
            to_row(record, ARITHMETIC, split, index) | {"prompt": messages(record.question)}
            for index, record in enumerate(part)
        ]
        parquet.write_table(pa.Table.from_pylist(rows, SCHEMA), folder / f"{split}.parquet")


def _problems() -> list[tuple[str, int]]:
    problems = [
        *((f"{a} + {b}", a + b) for a in _TO_25 for b in _TO_25),
        *((f"{a} * {b}", a * b) for a in _TO_20 for b in _TO_20 if a in _DIGITS or b in _DIGITS),
        *((f"{a + b} - {b}", a) for a in _TO_12 for b in _DIGITS),
    ]
    return [problem for problem in problems if problem not in EXAMPLES]


def messages(question: str) -> list[dict[str, str]]:
    chat = []
    for text, answer in WORKED:
        chat.append({"role": "user", "content": f"What is {text}?"})
        chat.append({"role": "assistant", "content": f"Let me think: {text} = {answer}. \\boxed{{{answer}}}"})
    return [*chat, {"role": "user", "content": question}]
