"""Corpora in all public forms, some of them damaged: each is read as it was written, or refused with file and line."""

from __future__ import annotations

import csv
import io
import json
import random
from pathlib import Path

from kit.damage import damaged_bytes, damaged_value
from kit.fuzz import ACCEPTED, REFUSED, cuts, told, try_all
from verl_credit_retriever.index.corpus import CorpusError, Documents, copy_corpus

TEXTS = (
    "On the river.",
    "two\nlines",
    "tab\there",
    'a "quote"',
    "é🜂",
    "  blank at its ends ",
    "\\u0041",
    "</s>",
)
ODD = (None, True, 3, 0.5, 10**400, "", " ", "\ud800", "\u200b", [], ["a"], {}, "x")
KEYS = {
    "contents": ("id", "contents"),
    "text": ("id", "text"),
    "beir": ("_id", "text"),
    "docid": ("docid", "text"),
}


def make(draw: random.Random) -> tuple[str, list[dict], list[dict]]:
    """(form, the rows of a file, the documents that they are)"""
    form, whole = draw.choice((*KEYS, "no id", "tsv")), draw.random() < 0.5
    name, text_key = KEYS.get(form, ("id", "text"))
    rows, documents = [], []
    for number in range(draw.randrange(1, 6)):
        title, text = draw.choice(("", "Town", "Two words")), draw.choice(TEXTS)
        contents = f"{title}\n{text}" if title else text
        fields = {"text": text, "title": title} if text_key == "text" else {"contents": contents}
        identity = str(number * 7) if form != "no id" else str(number)
        row = {name: number * 7 if whole and form != "tsv" else identity} if form != "no id" else {}
        rows.append({**row, **fields})
        documents.append({"id": identity, "contents": contents})
        if form != "tsv" and draw.random() < 0.3:
            rows[-1] |= {"url": "https://é", "metadata": {"a": [1]}}
            documents[-1]["url"] = "https://é"
    return form, rows, documents


def written(form: str, rows: list[dict], draw: random.Random) -> bytes:
    if form != "tsv":
        ascii_only = draw.random() < 0.5 or "\\ud800" in repr(rows)
        return "".join(json.dumps(row, ensure_ascii=ascii_only) + "\n" for row in rows).encode()
    table = io.StringIO()
    writer = csv.DictWriter(table, ["id", "text", "title"], delimiter="\t", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return table.getvalue().encode()


def law(work: Path, seed: int) -> str:
    draw = random.Random(seed)
    form, rows, documents = make(draw)
    damaged = draw.choice((None, None, "value", "bytes"))
    if damaged == "value" and form != "tsv":
        damaged_value(rows, draw, ODD)
    content = written(form, rows, draw)
    if damaged == "bytes":
        content = damaged_bytes(content, draw)[1]
    source, copy = work / "corpus", work / "copy"
    source.write_bytes(content)
    with told((form, content)):
        try:
            found = Documents(copy, copy_corpus(source, copy))
        except CorpusError as refusal:
            lines = any("\n" in row.get("text", "") for row in rows) if form == "tsv" else False
            assert damaged or lines, refusal  # csv may write a field over two lines, which is refused
            assert str(refusal).startswith(f"{source}:") and len(str(refusal)) < 1000
            return REFUSED
        read = [found[row] for row in range(len(found))]
        if not damaged:
            assert read == documents
        assert len({document["id"] for document in read}) == len(read) > 0
        for document in read:
            assert all(
                isinstance(value, str) and (value.strip() or key == "url") for key, value in document.items()
            )
            json.dumps(document, ensure_ascii=False).encode()
        return ACCEPTED


@cuts(300)
def test_a_corpus_is_read_as_it_was_written_or_refused_with_its_line(seeds, tmp_path):
    try_all(lambda seed: law(tmp_path, seed), seeds)
