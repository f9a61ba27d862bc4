"""Gold answers in every form of public files: a right answer scores 1, or the row is refused or named.

The oracle is the list of answers that was written; what the readers make of it is not asked.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from kit.fuzz import ACCEPTED, REFUSED, checker_of, command, cuts, one_plain_line, told, try_all
from kit.prepared import report, rows_of
from verl_credit.errors import ExitCode
from verl_credit.turns.rollout.reward.qa import compute_score

PIECES = (
    "Ann", "Lee", "O'Neil", "'", '"', "\\", "é", "日本", ",", " ", "  ", "]", "[", "(", ")", "{", "}", ":", "|", ";", "1995",
    "42.5", "A", "the", "-", "…", "</s>", "\\frac{1}{2}", "\t", "\n", "b'x'", "$", "#", "null", "nan", "array([", "\u200b",
)  # fmt: skip
SEVERAL = {
    "str": str,
    "json": json.dumps,
    "json utf-8": lambda golds: json.dumps(golds, ensure_ascii=False, indent=1),
    "numpy": lambda golds: str(np.array(golds, dtype=object)),
    "numpy repr": lambda golds: repr(np.array(golds, dtype=object)),
    "tuple": lambda golds: str(tuple(golds)) if len(golds) > 1 else str(golds),
    "split": "<|answer_split|>".join,
    "list": list,
    "list of a list": lambda golds: [golds],
    "list in a list": lambda golds: [str(golds)],
    "target": lambda golds: {"target": golds},
    "target in text": lambda golds: json.dumps({"target": golds, "form": "tag"}),
    "target holds text": lambda golds: {"target": str(golds)},
    "squad": lambda golds: {"text": golds, "answer_start": [0] * len(golds)},
    "squad in text": lambda golds: str({"text": golds, "answer_start": [0] * len(golds)}),
    "squad of numpy": lambda golds: str(
        {"text": np.array(golds, dtype=object), "answer_start": np.array([0])}
    ),
    "squad v1": lambda golds: [{"text": gold, "answer_start": 0} for gold in golds],
    "trivia": lambda golds: {"value": golds[0], "aliases": golds, "normalized_aliases": []},
    "trivia in text": lambda golds: str({"aliases": golds[1:], "value": golds[0]}),
}
JOINED = ("|", " ||| ", "</s>", ";", "; ", "\n", "\t")


def text_of(draw: random.Random) -> str:
    return "".join(draw.choices(PIECES, k=draw.choice((1, 1, 2, 3, 5)))).strip()


def make(seed: int) -> tuple[str, list[str], object]:
    """(the form, the right answers, the value of the field)"""
    draw = random.Random(seed)
    kind = draw.random()
    if kind < 0.15:
        number = draw.choice(
            (
                draw.randrange(-9, 10_000),
                draw.randrange(10**15),
                draw.randrange(99) / 2,
                10.0 ** draw.randrange(20),
            )
        )
        return (
            "number",
            [str(int(number)) if number == int(number) else str(number)],
            draw.choice((number, float(number), [number])),
        )
    golds = [gold for gold in (text_of(draw) for _ in range(draw.choice((1, 2, 2, 3)))) if gold] or ["Ann"]
    if kind < 0.3:
        return "joined", golds, draw.choice(JOINED).join(golds)
    if kind < 0.4:
        return "one", golds[:1], golds[0]
    form = draw.choice(list(SEVERAL))
    held = SEVERAL[form](golds)
    if kind < 0.55 and isinstance(held, str) and form != "split":
        return "cut", golds, held[: draw.randrange(1, len(held))]
    return form, golds, held


def scores(golds: list[str], truth: object) -> list[float]:
    return [compute_score("qa", f"<answer>{gold}</answer>", truth)["em"] for gold in golds]


def right(form: str, golds: list[str], held: object, truth: object) -> bool:
    """The row's right answers score; what is left of a value that was cut may hold none."""
    if form == "cut" and not any(quote in held for quote in "'\""):
        return True  # no answer of it is left
    if form == "cut" and held[0] in "({":
        return {"(": ",", "{": ":"}[held[0]] not in held
    return all(scores(golds, truth))


def law_of_a_row(folder: Path, form: str, golds: list[str], held: object) -> str:
    row = {
        "data_source": "qa",
        "prompt": [{"role": "user", "content": "Who? Write it as <answer>..</answer>."}],
        "reward_model": {"ground_truth": held},
    }
    file = folder / "rows.parquet"
    parquet.write_table(pa.Table.from_pylist([row]), file)
    code, said, err = command("prepare check", str(file))
    assert not err
    if code == ExitCode.PREFLIGHT:
        one_plain_line(said)
        assert f"{file} row 0: " in said and "reward_model.ground_truth" in said and "expected" in said
        return REFUSED
    assert code == ExitCode.DONE and said.startswith("1 rows can train\n")
    read = rows_of(file)[0]["reward_model"]["ground_truth"]
    if "is compared as it stands" not in said:
        assert right(form, golds, held, read)
    return ACCEPTED


def law_of_prepare(folder: Path, form: str, golds: list[str], held: object) -> str:
    source = folder / "train.jsonl"
    source.write_text(json.dumps({"question": "Who?", "answer": held}) + "\n")
    code, said, err = command("prepare", "qa", f"--source={source}", f"--out={folder / 'out'}")
    assert not err
    if code == ExitCode.PREFLIGHT:
        one_plain_line(said)
        assert "no row is left of 1 records: 1 " in said and "(first train.jsonl line 1" in said
        return REFUSED
    assert code == ExitCode.DONE
    truth = rows_of(folder / "out" / "train.parquet")[0]["reward_model"]["ground_truth"]
    counts = report(folder / "out")
    if not counts["gold_answers_doubted"] and not counts["gold_answers_left_out"]:
        assert right(form, golds, held, truth)
    return ACCEPTED


def certain(form: str, golds: list[str]) -> bool:
    """Nothing in the answers speaks against the form: these have to be read."""
    plain = all(gold.replace("'", "").replace(" ", "").isalnum() and "b'" not in gold for gold in golds)
    return form == "number" or (form in SEVERAL and plain)


@checker_of
def checker(folder: Path, seed: int) -> str:
    form, golds, held = make(seed)
    with told((form, golds, held)):
        verdicts = {law(folder, form, golds, held) for law in (law_of_a_row, law_of_prepare)}
        assert verdicts == {ACCEPTED} or not certain(form, golds), "a form that is certain is refused"
    return ACCEPTED if ACCEPTED in verdicts else REFUSED


@cuts(25, failed=(10756, 13195))  # a tuple that was cut in its first answer, after a comma
def test_a_right_answer_scores_or_its_row_is_named(seeds, tmp_path):
    with checker(tmp_path) as check:
        try_all(check, seeds)
