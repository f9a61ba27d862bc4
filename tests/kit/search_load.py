"""Client threads that ask a search server single queries and compare every answer with exact search."""

import random
import threading
from collections import Counter
from dataclasses import dataclass, field

import httpx

from verl_credit_retriever.asking import parse_served
from verl_credit_retriever.check import exact_answers, recall_at, wrong_score, wrong_text
from verl_credit_retriever.encoder import SentenceEncoder
from verl_credit_retriever.index.search import SearchIndex


def oracle(folders, queries: list[str], k: int) -> list[dict]:
    """What exact search in this process finds for each query in `folders`/index."""
    index = SearchIndex.load(folders / "index", backend="exact")
    encoder = SentenceEncoder.for_index(folders / "encoder", index.manifest)
    return exact_answers(index, encoder.encode_queries(queries), k)


def problem(answer: httpx.Response, exact: dict, k: int) -> str | None:
    """Why a 200 is not the answer to its query: not k documents, others, another score or text."""
    try:
        served = parse_served(answer.json(), k, rows=k)
    except ValueError as error:
        return str(error)
    if recall_at(served, exact, k) < 1:
        return f"found {[hit.id for hit in served]}; expected {sorted(exact)}"
    return wrong_score(served, exact) or wrong_text(served, exact)


@dataclass
class SearchLoad:
    """`clients` threads, each with one query after the other until the block ends.

    `seen` counts right answers as "200", "wrong" ones, other statuses, and broken connections by name; `bodies` has the
    first text of each.
    """

    url: str
    queries: list[str]
    exact: list[dict]
    k: int
    clients: int
    seen: Counter = field(default_factory=Counter)
    bodies: dict[str, str] = field(default_factory=dict)

    def __enter__(self) -> "SearchLoad":
        self._ended, self._came = False, threading.Condition()
        self._threads = [
            threading.Thread(target=self._ask, args=(n,), daemon=True) for n in range(self.clients)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._ended = True
        for thread in self._threads:
            thread.join(90)
        assert not any(thread.is_alive() for thread in self._threads), "a client still waits"

    def wait_for_answers(self, number: int, seconds: float = 60.0) -> None:
        """Until so many more right answers have come."""
        wanted = self.seen["200"] + number
        with self._came:
            assert self._came.wait_for(lambda: self.seen["200"] >= wanted, seconds), self.seen

    def _ask(self, number: int) -> None:
        draw = random.Random(number)
        # A connection for each query: one that is kept would always reach the same process.
        none_kept = httpx.Limits(max_keepalive_connections=0)
        with httpx.Client(timeout=60, trust_env=False, limits=none_kept) as client:
            while not self._ended:
                what, said = self._one(client, draw.randrange(len(self.queries)))
                with self._came:
                    self.seen[what] += 1
                    self.bodies.setdefault(what, said)
                    self._came.notify_all()

    def _one(self, client: httpx.Client, place: int) -> tuple[str, str]:
        body = {"queries": [self.queries[place]], "topk": self.k, "return_scores": True}
        try:
            answer = client.post(f"{self.url}/retrieve", json=body)
        except httpx.HTTPError as error:
            return type(error).__name__, str(error)
        if answer.status_code != 200:
            return str(answer.status_code), answer.text[:300]
        said = problem(answer, self.exact[place], self.k)
        return ("wrong", said) if said else ("200", "")
