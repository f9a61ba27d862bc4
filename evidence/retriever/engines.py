"""CPU time of a query in every engine of the encoder (`serve --encode-with`), one thread, and the distance from fp32.

    python evidence/retriever/engines.py [--work DIR]

prints the table of README.md. The encoders have random weights, in the shapes of all-MiniLM-L6-v2 and e5-base; the queries
have 10 to 20 tokens. CPU seconds of this process hardly depend on what else the machine does.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from bench_world import SHAPES, make_encoder, make_queries

from verl_credit_retriever import engines
from verl_credit_retriever.encoder import SentenceEncoder

SHAPES["minilm"] = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
}
BATCHES, SECONDS = (1, 8, 64), 3.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, help="keeps the encoders")
    given = parser.parse_args()
    torch.set_num_threads(1)
    queries = make_queries(max(BATCHES), seed=0)
    print("| encoder | engine | " + " | ".join(f"{size} a call" for size in BATCHES) + " | vectors apart |")
    print("|---" * (3 + len(BATCHES)) + "|")
    with tempfile.TemporaryDirectory() as scratch:
        for shape in ("minilm", "e5-base"):
            rows(shape, SentenceEncoder(make_encoder((given.work or Path(scratch)) / shape, shape)), queries)


def rows(shape: str, encoder: SentenceEncoder, queries: list[str]) -> None:
    ids = encoder.tokenize_queries(queries)
    plain = encoder.forward
    right_N_D, first = encoder.encode_tokens(ids), None
    for name in ("torch", *engines.MAKE):
        encoder.forward = plain if name == "torch" else engines.MAKE[name](encoder.model)
        apart = np.abs(encoder.encode_tokens(ids) - right_N_D).max()
        each = [milliseconds(encoder, ids[:size]) for size in BATCHES]
        first = first or each
        cells = [f"{one:.1f} ms ({of / one:.1f})" for one, of in zip(each, first, strict=True)]
        print(f"| {shape} | {name} | {' | '.join(cells)} | {apart:.0e} |", flush=True)


def milliseconds(encoder: SentenceEncoder, ids: list[list[int]]) -> float:
    """CPU time of a query, in calls of this batch."""
    encoder.encode_tokens(ids)
    calls, start = 0, time.process_time()
    while (spent := time.process_time() - start) < SECONDS:
        encoder.encode_tokens(ids)
        calls += 1
    return 1000 * spent / calls / len(ids)


if __name__ == "__main__":
    main()
