"""Corpora in all public forms, some of them damaged: each is read as it was written, or refused with file and line."""

from __future__ import annotations

import csv
import io
import json
import random
from pathlib import Path

import pytest

from kit.damage import damaged_bytes, damaged_value
from kit.fuzz import ACCEPTED, REFUSED, cuts, told, try_all
from verl_credit_retriever.index.corpus import BOM, CorpusError, Documents, copy_corpus

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


@pytest.mark.slow
@cuts(300)
def test_a_corpus_is_read_as_it_was_written_or_refused_with_its_line(seeds, tmp_path):
    try_all(lambda seed: law(tmp_path, seed), seeds)


def _copied(tmp_path, content: bytes) -> list[dict]:
    (tmp_path / "corpus").write_bytes(content)
    found = Documents(tmp_path / "copy", copy_corpus(tmp_path / "corpus", tmp_path / "copy"))
    return [found[row] for row in range(len(found))]


PSGS = b'id\ttext\ttitle\n1\t"Aaron ("" Ahar\xc3\xb4n"") is\ta prophet"\tAaron\n2\tNo quotes "here"\t"Two\twords"\n'
AARON = [
    {"id": "1", "contents": 'Aaron\nAaron (" Aharôn") is\ta prophet'},
    {"id": "2", "contents": 'Two words\nNo quotes "here"'},
]
GOOD = b'{"id": "a", "contents": "A\\ntext"}\n'
READ = [{"id": "a", "contents": "A\ntext"}]


@pytest.mark.parametrize(
    "content, documents",
    [
        (PSGS, AARON),
        (PSGS.replace(b"\n", b"\r\n"), AARON),
        (BOM + GOOD, READ),
        (GOOD + b"  \r\n", READ),
        (b'{"id": "a", "title": "Two\\nlines", "text": "x\\ny"}', [{"id": "a", "contents": "Two lines\nx\ny"}]),
        (b'{"id": "a", "title": "T", "text": "t", "contents": "C\\nc"}', [{"id": "a", "contents": "C\nc"}]),
        (b'{"_id": "b", "docid": "c", "text": "t", "url": 3}', [{"id": "b", "contents": "t"}]),
    ],
)  # fmt: skip
def test_forms_that_are_not_drawn(tmp_path, content, documents):
    assert _copied(tmp_path, content) == documents


@pytest.mark.parametrize(
    "content, said",
    [
        (GOOD + b'{"id": "b", "contents"', ":2: not JSON"),
        (GOOD + GOOD, ":2: id='a' was used on line 1"),
        (GOOD + b'{"id": "b", "contents": "  "}', ":2: contents='  '"),
        (GOOD + b'{"id": 7.5, "contents": "x"}', ":2: id=7.5; .* or a whole number$"),
        (GOOD + b'{"id": true, "contents": "x"}', ":2: id=True"),
        (GOOD + b'{"contents": "x"}', ":2: no id, and the first line has one"),
        (b'{"contents": "x"}\n' + GOOD, ":2: an id, and the first line has none"),
        (b'{"id": "7", "contents": "x"}\n{"id": 7, "contents": "x"}', ":2: id='7' was used on line 1"),
        (GOOD + b'["b"]', ":2: .* is not an object"),
        (GOOD + b"\n" + GOOD, ":2: not JSON"),
        (GOOD + b'{"id": "b", "contents": "\\ud800"}', ":2: contents holds a lone surrogate"),
        (GOOD + b"\xff\xfe", ":2: not UTF-8"),
        (b"", ": no rows"),
        (b'{"id": "a", "title": 3, "text": "t"}', ":1: contents=None; .* or title and text"),
        (b'{"docid": "a", "body": "b"}', ":1: contents=None; .* the line has docid, body$"),
        (b'{"id": "a", "contents": "x", "id": "b"}', ":1: not JSON .'id' occurs twice"),
        (b'{"id": "a", "contents": "x", "more": {"k": 1, "k": 1}}', ":1: not JSON .'k' occurs twice"),
        ('{"id": "\u200b", "contents": "x"}'.encode(), ":1: id=.*non-empty"),
        ('{"id": "a", "contents": " \ufeff\u2003\u2060"}'.encode(), ":1: contents=.*non-empty"),
        (PSGS + b"3\ttext\n", ":4: not id, text, title as csv writes them with tabs"),
        (PSGS + b'3\t"over\n two lines"\tT\n', ":4: not id, text, title"),
        (PSGS + b"3\ttext\tT\tmore\n", ":4: not id, text, title"),
        (PSGS + b"1\ttext\tT\n", ":4: id='1' was used on line 2"),
        (PSGS + b"3\t\xff\tT\n", ":4: not id, text, title .*utf-8"),
        (PSGS + b"3\t \tT\n", ":4: contents=' '; expected"),
        (b"1\ttext\ttitle\n", ":1: not JSON .* or a TSV whose first line is id, text, title"),
        (b"PAR1\x15", ": a Parquet file; expected a JSONL file"),
    ],
)  # fmt: skip
def test_what_is_no_corpus_is_refused_with_its_line(tmp_path, content, said):
    with pytest.raises(CorpusError, match=f"corpus{said}"):
        _copied(tmp_path, content)
