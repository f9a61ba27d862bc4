"""In-process search over the lab's index, for building and gating; training uses the retriever service."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from verl_credit.lab.protocol import TOP_K
from verl_credit_retriever.encoder.encoder import SentenceEncoder
from verl_credit_retriever.index.search import SearchIndex


class LocalRetriever:
    """Documents for queries; every distinct query is searched once."""

    def __init__(self, encoder: Path, index: Path, *, k: int = TOP_K):
        self._encoder, self._index, self._k = SentenceEncoder(encoder), SearchIndex.load(index), k
        self._index.check_encoder(self._encoder)
        self._known: dict[str, list[dict]] = {}

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
    ranks = [
        next((rank for rank, doc in enumerate(hits, 1) if doc["id"] == gold), None)
        for hits, gold in zip(retriever.search(queries), gold_ids, strict=True)
    ]
    depth = max(len(hits) for hits in retriever.search(queries))
    return {k: sum(r is not None and r <= k for r in ranks) / len(ranks) for k in range(1, depth + 1)}
