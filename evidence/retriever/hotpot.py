"""Recall of supporting paragraphs on real questions, served and by exact search.

    python evidence/retriever/hotpot.py --encoder FOLDER [--data FILE] [--k 1,2,3,10] [--kind flat] [--json FILE]

The paragraphs of HotpotQA questions (distractor setting: ten per question) become one corpus, equal ones once; it
is indexed with the encoder and served by a real server. For every question: the share of its supporting
paragraphs among the first k, from the server and from the exact backend, and how many of the first k documents
of both are the same. `--data` defaults to hotpotqa_dev_distractor_70.json in $VERL_CREDIT_TEST_DATA.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

import httpx
import transformers

from verl_credit_retriever.encoder.encoder import SentenceEncoder
from verl_credit_retriever.index.search import SearchIndex, build_index
from verl_credit_retriever.launch import start_server

FILE = "hotpotqa_dev_distractor_70.json"


def paragraphs_and_questions(file: Path) -> tuple[dict[str, str], list[tuple[str, set[str]]]]:
    """(contents by id, [(question, ids of its supporting paragraphs)]); a paragraph is "Title\\ntext"."""
    id_of: dict[str, str] = {}
    questions = []
    for row in json.loads(file.read_text(encoding="utf-8")):
        context, supporting = row["context"], set(row["supporting_facts"]["title"])
        ids = set()
        for title, sentences in zip(context["title"], context["sentences"], strict=True):
            contents = f"{title}\n{''.join(sentences).strip()}"
            paragraph = id_of.setdefault(contents, str(len(id_of)))
            if title in supporting:
                ids.add(paragraph)
        if not ids:
            raise ValueError(f"{file}: no supporting paragraph for {row['question']!r}")
        questions.append((row["question"], ids))
    return {paragraph: contents for contents, paragraph in id_of.items()}, questions


def measure(file: Path, encoder_folder: Path, ks: list[int], kind: str, work: Path) -> dict:
    paragraphs, questions = paragraphs_and_questions(file)
    corpus = work / "corpus.jsonl"
    with open(corpus, "w", encoding="utf-8") as handle:
        for paragraph, contents in paragraphs.items():
            handle.write(json.dumps({"id": paragraph, "contents": contents}) + "\n")
    encoder = SentenceEncoder(encoder_folder)
    build_index(corpus, encoder, work / "index", kind=kind)
    texts, top = [question for question, _ in questions], max(ks)
    exact = SearchIndex.load(work / "index", backend="exact", mmap=True).search(
        encoder.encode_queries(texts), top
    )
    exact_ids = [[document["id"] for document, _ in hits] for hits in exact]
    with start_server(work / "index", encoder_folder, log_path=work / "server.log") as server:
        served_ids = []
        for text in texts:  # one request per question, as a rollout sends them
            body = {"queries": [text], "topk": top, "return_scores": True}
            answer = httpx.post(f"{server.url}/retrieve", json=body, timeout=60, trust_env=False)
            answer.raise_for_status()
            served_ids.append([hit["document"]["id"] for hit in answer.json()["result"][0]])
    supporting = [ids for _, ids in questions]
    return {
        "paragraphs": len(paragraphs),
        "questions": len(questions),
        "kind": kind,
        "encoder": encoder.fingerprint(),
        "recall_of_supporting": {
            str(k): {"served": _recall(served_ids, supporting, k), "exact": _recall(exact_ids, supporting, k)}
            for k in ks
        },
        "same_as_exact": {
            str(k): sum(len(set(a[:k]) & set(b[:k])) for a, b in zip(served_ids, exact_ids, strict=True))
            / (k * len(texts))
            for k in ks
        },
        "by_chance": {str(k): k / len(paragraphs) for k in ks},
    }


def _recall(found: list[list[str]], supporting: list[set[str]], k: int) -> float:
    shares = [len(set(ids[:k]) & right) / len(right) for ids, right in zip(found, supporting, strict=True)]
    return sum(shares) / len(shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--encoder", type=Path, required=True)
    parser.add_argument("--data", type=Path, help=f"default: $VERL_CREDIT_TEST_DATA/{FILE}")
    parser.add_argument("--k", default="1,2,3,10")
    parser.add_argument("--kind", default="flat")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.data is None and "VERL_CREDIT_TEST_DATA" not in os.environ:
        parser.error(f"give --data FILE, or set VERL_CREDIT_TEST_DATA to the folder of {FILE}")
    transformers.utils.logging.disable_progress_bar()
    file = options.data or Path(os.environ["VERL_CREDIT_TEST_DATA"]) / FILE
    with tempfile.TemporaryDirectory() as scratch:
        ks = [int(k) for k in options.k.split(",")]
        report = measure(file, options.encoder, ks, options.kind, Path(scratch))
    print(f"{report['paragraphs']} paragraphs, {report['questions']} questions, {report['kind']}")
    print("| k | recall, served | recall, exact | same documents as exact | recall by chance |")
    print("|---|---|---|---|---|")
    for k, recall in report["recall_of_supporting"].items():
        rest = f"{report['same_as_exact'][k]:.4f} | {report['by_chance'][k]:.4f}"
        print(f"| {k} | {recall['served']:.4f} | {recall['exact']:.4f} | {rest} |")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
