"""Search over the lab's index in this process, and a control index with swapped contents.

Building and gating search here; training uses the retriever service.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from verl_credit.worlds.lab.protocol import TOP_K
from verl_credit_retriever.encoder import SentenceEncoder
from verl_credit_retriever.index.manifest import write_manifest
from verl_credit_retriever.index.search import SearchIndex


class LocalRetriever:
    """Finds documents for queries, and searches every distinct query once."""

    def __init__(self, encoder: Path, index: Path, *, k: int = TOP_K):
        self._encoder, self._index, self._k = SentenceEncoder(encoder), SearchIndex.load(index), k
        self._index.check_encoder(self._encoder)
        self._known: dict[str, list[dict]] = {}

    @property
    def fingerprint(self) -> str:
        """Of the index, as its server reports it."""
        return self._index.fingerprint

    def search(self, queries: Iterable[str]) -> list[list[dict]]:
        """Per query the k best documents ({"id", "contents"}), best first."""
        queries = list(queries)
        missing = sorted(set(queries) - self._known.keys())
        if missing:
            found = self._index.search(self._encoder.encode_queries(missing), self._k)
            self._known |= {q: [doc for doc, _ in hits] for q, hits in zip(missing, found, strict=True)}
        return [self._known[q] for q in queries]


def recall(retriever: LocalRetriever, queries: list[str], gold_ids: list[str]) -> dict[int, float]:
    """Share of queries whose gold article is among the first 1, 2, ... k results."""
    found = [[doc["id"] for doc in hits] for hits in retriever.search(queries)]
    return {
        k: sum(gold in ids[:k] for ids, gold in zip(found, gold_ids, strict=True)) / len(found)
        for k in range(1, max(map(len, found)) + 1)
    }


def swap_contents(index: Path, out: Path, seed: int = 0) -> Path:
    """A copy of ``index`` in which every article keeps its title, id and vector but has another one's text.

    A query finds the same titles, but reads about something else. A policy that learns by reading cannot improve on
    this index; a policy that exploits anything else can. The permutation is one cycle, so no article keeps its text.

    Raises IndexMismatch when ``index`` is damaged, FileExistsError when ``out`` exists.
    """
    index, out = Path(index), Path(out)
    source = SearchIndex.load(index)
    documents = [source.documents[row] for row in range(len(source))]
    pages = [document["contents"].partition("\n") for document in documents]
    order = list(range(len(documents)))
    random.Random(f"swap {seed}").shuffle(order)
    text_of = {row: pages[other][2] for row, other in zip(order, order[1:] + order[:1], strict=True)}
    out.mkdir(parents=True)
    ends = [0]
    with open(out / "corpus.jsonl", "wb") as lines:
        for row, document in enumerate(documents):
            swapped = {"id": document["id"], "contents": f"{pages[row][0]}\n{text_of[row]}"}
            ends.append(ends[-1] + lines.write((json.dumps(swapped) + "\n").encode()))
    np.save(out / "offsets.npy", np.asarray(ends, dtype=np.int64), allow_pickle=False)
    shutil.copy(index / "index.faiss", out / "index.faiss")
    encoder = source.manifest["encoder"]
    write_manifest(out, kind=source.manifest["kind"], rows=len(documents), encoder=encoder)
    return out
