"""How many of the nearest documents does each kind of index find? Recall against exact search over the same vectors.

    python evidence/retriever/recall.py --work DIR --encoder ENCODER --data FOLDER [--rows 10000] [--json FILE]

ENCODER is trained (all-MiniLM-L6-v2, `make weights`). The rows are the paragraphs of hotpotqa_dev_distractor_70.json, and
texts of a title and a sentence of theirs, drawn with a seed, until there are ROWS. The queries are its 70 questions and
those of open_domain_qa_420.jsonl. Every kind is built and searched by the product from the same vectors, which DIR keeps.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path

import faiss
import numpy as np
import torch

from verl_credit_retriever.check import Served, exact_answers, recall_at
from verl_credit_retriever.encoder import SentenceEncoder
from verl_credit_retriever.index.memory import SEARCH_BUFFERS
from verl_credit_retriever.index.search import SearchIndex, build_index

KS = (3, 10)
# What an index is built with, and the searches that are tried with it.
KINDS: list[tuple[str, str, dict, list[dict]]] = [
    ("flat", "fp32", {}, [{}]),
    ("flat", "fp16", {}, [{}]),
    ("sq8", "fp32", {}, [{}]),
    ("hnsw", "fp32", {}, [{}]),
    ("ivf", "fp32", {}, [{}, {"nprobe": 64}, {"nprobe": 256}]),
    ("ivfpq", "fp32", {"pq_bytes": 48}, [{"nprobe": 256, "refine": refine} for refine in (1, 4, 16)]),
    ("ivfpq", "fp32", {}, [{}, {"nprobe": 64}, *({"nprobe": 256, "refine": n} for n in (1, 4, 16))]),
]


class KeptVectors:
    """The vectors of these texts as an encoder of passages, so that they are computed once."""

    dtype = "bf16"

    def __init__(self, encoder: SentenceEncoder, texts: list[str], file: Path):
        if not file.exists():
            np.save(file, np.concatenate([encoder.encode_passages(part) for part in _parts(texts, 2000)]))
        self._row = {text: row for row, text in enumerate(texts)}
        self._vectors_M_D = np.load(file)
        self._encoder, self.dim = encoder, encoder.dim
        if len(self._vectors_M_D) != len(texts):
            raise ValueError(f"{file}: {len(self._vectors_M_D)} rows; expected {len(texts)}: delete it")

    def encode_passages(self, texts: list[str]) -> np.ndarray:
        return self._vectors_M_D[[self._row[text] for text in texts]]

    def fingerprint(self) -> dict:
        return self._encoder.fingerprint()


def _parts(texts: list[str], size: int):
    for start in range(0, len(texts), size):
        print(f"encoding {start:,} of {len(texts):,}", flush=True)
        yield texts[start : start + size]


def documents(questions: list[dict], rows: int) -> list[str]:
    """The paragraphs, then texts of a title and a sentence of another."""
    paragraphs: dict[str, list[str]] = {}
    for question in questions:
        context = question["context"]
        paragraphs.update(zip(context["title"], context["sentences"], strict=True))
    texts = {f"{title}\n{''.join(sentences)}": None for title, sentences in paragraphs.items()}
    sentences = [sentence.strip() for of in paragraphs.values() for sentence in of if sentence.strip()]
    drawn, titles = random.Random(0), list(paragraphs)
    while len(texts) < rows:
        texts[f"{drawn.choice(titles)}\n{drawn.choice(sentences)}"] = None
    return list(texts)


def measure(folder: Path, exact: list[dict[str, Served]], queries_N_D: np.ndarray, search: dict) -> dict:
    index = SearchIndex.load(folder, verify="none", **search)
    found = [
        [Served(document["id"], document["contents"], score) for document, score in hits]
        for hits in index.search(queries_N_D, max(KS))
    ]
    recall = {
        f"recall@{k}": round(
            statistics.mean(recall_at(hits, right, k) for hits, right in zip(found, exact, strict=True)), 4
        )
        for k in KS
    }
    size = (index.memory.total - SEARCH_BUFFERS) / len(index)
    return {**recall, "bytes_per_row": round(size), "search": index.search_parameters}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("work", "encoder", "data"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    options.work.mkdir(parents=True, exist_ok=True)
    questions = json.loads((options.data / "hotpotqa_dev_distractor_70.json").read_text(encoding="utf-8"))
    more = (options.data / "open_domain_qa_420.jsonl").read_text(encoding="utf-8").splitlines()
    asked = [row["question"] for row in [*questions, *map(json.loads, more)]]
    texts = documents(questions, options.rows)
    encoder = SentenceEncoder(options.encoder, query_prefix="", passage_prefix="", dtype="bf16")
    kept = KeptVectors(encoder, texts, options.work / "vectors.npy")
    corpus = options.work / "corpus.jsonl"
    rows = ({"id": str(row), "contents": text} for row, text in enumerate(texts))
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    queries_N_D = encoder.encode_queries(asked)
    build_index(corpus, kept, options.work / "exact", kind="exact", overwrite=True)
    exact = exact_answers(SearchIndex.load(options.work / "exact"), queries_N_D, max(KS))
    results = []
    for kind, dtype, built, searches in KINDS:
        folder = options.work / "index"
        build_index(corpus, kept, folder, kind=kind, dtype=dtype, overwrite=True, **built)
        for search in searches:
            results.append(
                {"kind": kind, "dtype": dtype, **built, **measure(folder, exact, queries_N_D, search)}
            )
            print(json.dumps(results[-1]), flush=True)
    if options.json:
        head = {"rows": len(texts), "dim": encoder.dim, "queries": len(asked)}
        options.json.write_text(json.dumps({**head, "kinds": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
