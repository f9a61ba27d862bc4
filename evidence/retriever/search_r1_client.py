"""Queries a retriever as Search-R1's clients do, with one blocking `requests.post` per batch of queries.

    python evidence/retriever/search_r1_client.py http://127.0.0.1:8000 "who founded Rolkax" [query ...] [--topk 3]

Works against any server with Search-R1's POST /retrieve. Uses `requests` where it is installed and the standard
library's urllib otherwise.
"""

import argparse
import json
import urllib.request


def post(url: str, payload: dict) -> dict:
    """The JSON answer to `payload`. Errors: HTTPError for a status other than 200."""
    try:
        import requests
    except ImportError:
        request = urllib.request.Request(
            url, json.dumps(payload).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)
    answer = requests.post(url, json=payload)
    answer.raise_for_status()
    return answer.json()


def batch_search(server: str, queries: list[str], topk: int) -> list[list[dict]]:
    """The documents of every query, best first, as the rollout reads them: from hits with scores."""
    payload = {"queries": queries, "topk": topk, "return_scores": True}
    results = post(f"{server}/retrieve", payload)["result"]
    return [[hit["document"] for hit in results[i]] for i in range(len(queries))]


def batch_search_without_scores(server: str, queries: list[str], topk: int) -> list[list[dict]]:
    """The same without scores: a hit is the document itself."""
    results = post(f"{server}/retrieve", {"queries": queries, "topk": topk, "return_scores": False})["result"]
    return [[results[i][j] for j in range(len(results[i]))] for i in range(len(queries))]


def passages(documents: list[dict]) -> str:
    """One page for the policy: every document with its number, its title (the first line) and its text."""
    lines = []
    for number, document in enumerate(documents, start=1):
        title, _, text = document["contents"].partition("\n")
        lines.append(f"Doc {number}(Title: {title}) {text}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("server")
    parser.add_argument("queries", nargs="+")
    parser.add_argument("--topk", type=int, default=3)
    options = parser.parse_args()
    with_scores = batch_search(options.server, options.queries, options.topk)
    without = batch_search_without_scores(options.server, options.queries, options.topk)
    assert with_scores == without, "the two answer formats name different documents"
    for query, documents in zip(options.queries, with_scores, strict=True):
        print(f"{query}\n{passages(documents)}\n")


if __name__ == "__main__":
    main()
