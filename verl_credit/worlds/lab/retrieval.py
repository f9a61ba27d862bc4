"""Search over the lab's index in this process, for the build and its gate; training uses the retriever service."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from verl_credit.worlds.lab.protocol import TOP_K
from verl_credit_retriever.encoder import SentenceEncoder
from verl_credit_retriever.index.search import SearchIndex


class LocalRetriever:
    """Finds documents for queries; every distinct query is searched once."""

    def __init__(self, encoder: Path, index: Path, *, k: int = TOP_K):
        self._encoder, self._index, self._k = SentenceEncoder(encoder), SearchIndex.load(index), k
        self._index.check_encoder(self._encoder)
        self._known: dict[str, list[dict]] = {}

    @property
    def fingerprint(self) -> str:
        """The index's fingerprint, as its server reports it."""
        return self._index.fingerprint

    def search(self, queries: Iterable[str]) -> list[list[dict]]:
        """Returns for each query the k best documents ({"id", "contents"}), best first."""
        queries = list(queries)
        missing = sorted(set(queries) - self._known.keys())
        if missing:
            results = self._index.search(self._encoder.encode_queries(missing), self._k)
            self._known |= {q: [doc for doc, _ in hits] for q, hits in zip(missing, results, strict=True)}
        return [self._known[q] for q in queries]


def recall(retriever: LocalRetriever, queries: list[str], gold_ids: list[str]) -> dict[int, float]:
    """Share of queries whose gold article is among the first 1, 2, ... k results."""
    ranked = [[doc["id"] for doc in hits] for hits in retriever.search(queries)]
    return {
        k: sum(gold in ids[:k] for ids, gold in zip(ranked, gold_ids, strict=True)) / len(ranked)
        for k in range(1, max(map(len, ranked)) + 1)
    }
