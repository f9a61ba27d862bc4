"""Generated articles of towns, an index of them with a trained encoder, and what exact search finds for questions."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

from verl_credit.worlds.real.build import RealPaths, build_encoder
from verl_credit_retriever.check import exact_answers
from verl_credit_retriever.encoder import SentenceEncoder
from verl_credit_retriever.index.search import SearchIndex

K = 3
SYLLABLES = [
    "ka",
    "vel",
    "mor",
    "sa",
    "rin",
    "to",
    "bel",
    "du",
    "nar",
    "li",
    "gos",
    "pe",
    "tha",
    "wen",
    "zu",
    "fro",
]


def name(draw: random.Random) -> str:
    return "".join(draw.choices(SYLLABLES, k=draw.choice((2, 3)))).capitalize()


def articles(rows: int) -> list[dict]:
    """Short articles of towns: different, and all of one kind, so that a wrong one would be near."""
    draw, found = random.Random(0), []
    for row in range(rows):
        town, river, mayor, trade = (
            name(draw),
            name(draw),
            name(draw),
            draw.choice(("salt", "bells", "glass", "wool", "ships")),
        )
        text = f"{town} is a town on the river {river}, founded in {draw.randint(900, 1900)}. "
        text += f"Its mayor is {mayor} {name(draw)}. The town is known for its {trade} and for the bridge of {name(draw)}."
        found.append(
            {"id": str(row), "contents": f"{town} ({row})\n{text}", "asked": (town, river, mayor, trade)}
        )
    return found


def questions(found: list[dict], number: int) -> list[str]:
    draw, asked = random.Random(1), set()
    forms = (
        "Who is the mayor of {0}?",
        "Which town lies on the river {1}?",
        "Where is {2} the mayor?",
        "Who makes {3} in {0}?",
    )
    while len(asked) < number:
        asked.add(draw.choice(forms).format(*draw.choice(found)["asked"]))
    return sorted(asked)


def build(work: Path, rows: int) -> tuple[Path, Path, list[str], list[dict]]:
    """(index, encoder, queries, what exact search finds for each); kept in ``work``."""
    paths = RealPaths(work)
    build_encoder(paths, lambda share, text: None)
    found = articles(rows)
    index = work / f"index-{rows}"
    if not (index / "manifest.json").exists():
        corpus = work / "corpus.jsonl"
        lines = [json.dumps({key: row[key] for key in ("id", "contents")}) + "\n" for row in found]
        corpus.write_text("".join(lines), encoding="utf-8")
        command = [sys.executable, "-m", "verl_credit_retriever.cli", "index", "--corpus", str(corpus)]
        command += [
            "--encoder",
            str(paths.encoder),
            "--out",
            str(index),
            "--query-prefix",
            "",
            "--passage-prefix",
            "",
        ]
        subprocess.run([*command, "--overwrite"], check=True, stdout=subprocess.DEVNULL)
    queries = questions(found, rows)
    encoder = SentenceEncoder(paths.encoder, query_prefix="", passage_prefix="")
    vectors_N_D = encoder.encode_queries(queries)
    exact = exact_answers(SearchIndex.load(index, backend="exact", mmap=True), vectors_N_D, K)
    return index, paths.encoder, queries, exact
