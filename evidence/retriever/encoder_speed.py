"""Is a query encoded faster on a CPU in int8 or bf16, and does it find the same documents?

    python evidence/retriever/encoder_speed.py --work DIR --encoder ENCODER --questions QUESTIONS [--json FILE]

Speed: an encoder of e5-base's shape (random weights, kept in DIR), queries of 10 to 20 tokens, in calls of 1, 8 and 64; the
three forms in turn, and the median of the rounds. `int8` is torch's dynamic quantisation of linear layers, `bf16` autocast.
Documents: ENCODER (trained, all-MiniLM-L6-v2) encodes the paragraphs of QUESTIONS in fp32, as an index holds them, and the
questions in each form. Reported: recall@3 of the supporting paragraphs, and the share of fp32's three documents found.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from bench_world import make_encoder, make_queries
from torch.ao.quantization import quantize_dynamic

from verl_credit_retriever.encoder import SentenceEncoder

CALLS, ROUNDS, K = (1, 8, 64), 15, 3
FORMS = ("fp32", "int8", "bf16")


def encoders(folder: Path, **options) -> dict[str, Callable[[list[str]], np.ndarray]]:
    """What encodes queries, by form."""
    plain = SentenceEncoder(folder, **options)
    small = copy.copy(plain)
    small._model = quantize_dynamic(copy.deepcopy(plain._model), {torch.nn.Linear}, dtype=torch.qint8)

    def form(encoder: SentenceEncoder, context) -> Callable[[list[str]], np.ndarray]:
        def encode(queries: list[str]) -> np.ndarray:
            with context():
                return encoder.encode_queries(queries)

        return encode

    return {
        "fp32": form(plain, nullcontext),
        "int8": form(small, nullcontext),
        "bf16": form(plain, lambda: torch.autocast("cpu", torch.bfloat16)),
    }


def speeds(work: Path) -> dict[str, dict[str, float]]:
    """Queries per second, by size of a call and form."""
    forms, found = encoders(make_encoder(work / "e5-base", "e5-base")), {}
    for size in CALLS:
        seconds: dict[str, list[float]] = {name: [] for name in FORMS}
        for number in range(ROUNDS + 1):
            queries = make_queries(size, seed=number)
            for name, encode in forms.items():
                begin = time.perf_counter()
                encode(queries)
                seconds[name].append(time.perf_counter() - begin)
        found[str(size)] = {name: size / statistics.median(of[1:]) for name, of in seconds.items()}
    return found


def documents(folder: Path, questions: Path) -> dict[str, dict[str, float]]:
    """recall@3 of the supporting paragraphs, and how many of fp32's documents each form finds."""
    rows = json.loads(questions.read_text(encoding="utf-8"))
    texts: dict[str, str] = {}
    for row in rows:
        for title, sentences in zip(row["context"]["title"], row["context"]["sentences"], strict=True):
            texts.setdefault(title, f"{title}\n{''.join(sentences)}")
    titles = list(texts)
    forms = encoders(folder, query_prefix="", passage_prefix="")
    stored_P_D = SentenceEncoder(folder, query_prefix="", passage_prefix="").encode_passages(
        list(texts.values())
    )
    best = {
        name: np.argsort(-encode([row["question"] for row in rows]) @ stored_P_D.T, axis=1, kind="stable")[
            :, :K
        ]
        for name, encode in forms.items()
    }
    found = {}
    for name, best_N_K in best.items():
        recalls = []
        for row, places in zip(rows, best_N_K, strict=True):
            wanted = set(row["supporting_facts"]["title"])
            recalls.append(len(wanted & {titles[place] for place in places}) / len(wanted))
        same = [len({*a} & {*b}) / K for a, b in zip(best_N_K, best["fp32"], strict=True)]
        found[name] = {f"recall@{K}": statistics.mean(recalls), "same_documents": statistics.mean(same)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--encoder", type=Path, required=True)
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(2)
    result = {
        "queries_per_s": speeds(options.work),
        "documents": documents(options.encoder, options.questions),
    }
    text = json.dumps(result, indent=1)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
