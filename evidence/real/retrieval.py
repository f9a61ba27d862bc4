"""Recall of supporting paragraphs with a real encoder, served, against sentence-transformers' own vectors.

    python evidence/real/retrieval.py --real DIR --questions hotpotqa_dev_distractor_70.json

`verl-credit prepare hotpotqa` writes the paragraphs of all questions as a corpus, `verl-credit-retriever index` indexes
them with DIR/encoder, and a real server answers one request per question. Recall: the share of a question's two supporting
paragraphs among the first k. Beside it: the same encoder in sentence-transformers, and the products of all its vectors.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import httpx
import numpy as np
from common import arguments, machine, with_interval, write
from questions70 import ONE, Question, read_questions

from verl_credit.data.prepare import prepare
from verl_credit.search.pages import Page
from verl_credit_retriever.launch import start_server

KS = (1, 2, 3, 5, 10)
PREFIXES = ("--query-prefix", "", "--passage-prefix", "")


def served(corpus: Path, encoder: Path, texts: list[str], work: Path) -> list[list[tuple[str, float]]]:
    """(id, score) of the first documents for every text, best first."""
    index = [sys.executable, "-m", "verl_credit_retriever.cli", "index", "--corpus", str(corpus)]
    index += ["--encoder", str(encoder), "--out", str(work / "index"), *PREFIXES]
    subprocess.run(index, check=True, stdout=subprocess.DEVNULL)
    found = []
    with start_server(work / "index", encoder, log_path=work / "server.log") as server:
        for text in texts:  # one request per question, as a rollout sends them
            body = {"queries": [text], "topk": max(KS), "return_scores": True}
            answer = httpx.post(f"{server.url}/retrieve", json=body, timeout=60, trust_env=False)
            answer.raise_for_status()
            found.append([(hit["document"]["id"], hit["score"]) for hit in answer.json()["result"][0]])
    return found


def brute_force(encoder: Path, documents: dict[str, str], texts: list[str]) -> np.ndarray:
    """Products of every text's vector with every document's, [texts, documents]; sentence-transformers encodes."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(encoder), device="cpu")
    encode = lambda lines: model.encode(lines, normalize_embeddings=True, show_progress_bar=False)  # noqa: E731
    return encode(texts).astype(np.float64) @ encode(list(documents.values())).astype(np.float64).T


def page_ids(pages: Iterable[Page], documents: dict[str, str]) -> set[str]:
    id_of = {contents: name for name, contents in documents.items()}
    return {id_of[f"{page.title}\n{page.text}"] for page in pages}


def recall(found: list[list[str]], right: list[set[str]], k: int) -> dict:
    pairs = zip(found, right, strict=True)
    shares = np.array([len(set(ids[:k]) & wanted) / len(wanted) for ids, wanted in pairs])
    return with_interval(len(shares), lambda chosen: shares[chosen].mean())


def by_page(found: list[list[str]], questions: list[Question], documents: dict[str, str]) -> dict:
    """Recall of the paragraph with the answer and of the other one, where only one has it."""
    chosen = [n for n, question in enumerate(questions) if question.kind == ONE]
    ids = [found[n] for n in chosen]
    split = [questions[n].answer_page_and_other for n in chosen]
    return {
        name: {str(k): recall(ids, [page_ids([pages[i]], documents) for pages in split], k) for k in KS}
        for i, name in enumerate(("answer page", "bridge page"))
    }


def main() -> None:
    options = arguments(__doc__, "retrieval").parse_args()
    questions, encoder = read_questions(options.questions), options.real / "encoder"
    texts = [question.text for question in questions]
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        prepare("hotpotqa", str(options.questions), work / "data")
        lines = (work / "data" / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
        documents = {row["id"]: row["contents"] for row in map(json.loads, lines)}
        ours = served(work / "data" / "corpus.jsonl", encoder, texts, work)
    scores = brute_force(encoder, documents, texts)
    names = list(documents)
    theirs = [[names[i] for i in row[: max(KS)]] for row in np.argsort(-scores, axis=1, kind="stable")]
    ids = [[name for name, _ in hits] for hits in ours]
    right = [page_ids(question.supporting, documents) for question in questions]
    place = {name: i for i, name in enumerate(names)}
    apart = [abs(score - scores[n, place[name]]) for n, hits in enumerate(ours) for name, score in hits]
    report = {
        "command": "python evidence/real/retrieval.py --real DIR --questions hotpotqa_dev_distractor_70.json",
        "machine": machine("torch", "transformers", "sentence-transformers"),
        "paragraphs": len(documents),
        "recall_of_supporting": {str(k): recall(ids, right, k) for k in KS},
        "recall_of_sentence_transformers": {str(k): recall(theirs, right, k)["value"] for k in KS},
        "recall_by_page": by_page(ids, questions, documents),
        "by_chance": {str(k): k / len(documents) for k in KS},
        "questions_with_the_same_first_10_in_order": sum(a == b for a, b in zip(ids, theirs, strict=True)),
        "largest_difference_of_a_score": max(apart),
        "documents": [
            {"question": text, "supporting": sorted(found), "served": hits}
            for text, found, hits in zip(texts, right, ours, strict=True)
        ],
    }
    print(json.dumps({name: value for name, value in report.items() if name != "documents"}, indent=1))
    write(options.json, report)


if __name__ == "__main__":
    main()
