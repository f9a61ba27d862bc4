"""Does a CPU encode faster with several batches at once than with all cores on one? Times the same queries both ways.

    python evidence/retriever/streams.py DIR [--queries 2 8 16 64] [--rounds 4]

torch: one call with all threads, and as many calls as threads with one thread each, among which the queries are dealt out by
length. openvino: a model compiled for all threads, and one with a stream for each. Both ways take turns; the ratios are of
the medians and of the least of all rounds. The encoder has e5-base's shape.
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import numpy as np
import openvino
import torch
import transformers
from bench_world import make_encoder, make_queries

from verl_credit_retriever.encoder import SentenceEncoder

THREADS = os.cpu_count()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dir", type=Path, help="of the encoder")
    parser.add_argument("--queries", type=int, nargs="+", default=[2, 8, 16, 64])
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(THREADS)
    encoder = SentenceEncoder(make_encoder(options.dir, "e5-base"))
    print("| engine | queries | one call, ms | at once, ms | as fast, medians | as fast, least |")
    print("|---|---|---|---|---|---|")
    for name, one, several in (("torch", *by_torch(encoder)), ("openvino", *by_openvino(encoder))):
        for number in options.queries:
            queries, seconds = make_queries(600, 1)[:number], ([], [])
            for _ in range(1 + options.rounds):
                for way, took in zip((one, several), seconds, strict=True):
                    start = time.perf_counter()
                    way(queries)
                    took.append(time.perf_counter() - start)
            (a, b), (least_a, least_b) = ([of(took[1:]) for took in seconds] for of in (median, min))
            print(
                f"| {name} | {number} | {1e3 * a:.0f} | {1e3 * b:.0f} | {a / b:.2f} | {least_a / least_b:.2f} |"
            )


def dealt(encoders: list[SentenceEncoder], starts: Callable[[], None]) -> Callable[[list[str]], list]:
    pools = [ThreadPoolExecutor(1, initializer=starts) for _ in encoders]

    def encode(queries: list[str]) -> list:
        by_length = sorted(queries, key=len)
        parts = [by_length[n :: len(encoders)] for n in range(len(encoders))]
        jobs = zip(pools, encoders, parts, strict=True)
        return [job.result() for job in [pool.submit(one.encode_queries, part) for pool, one, part in jobs]]

    return encode


def with_forward(encoder: SentenceEncoder, forward: Callable) -> SentenceEncoder:
    """The encoder with another forward, and a tokenizer of its own, which no two threads may share."""
    own = copy.copy(encoder)
    own._tokenizer, own.forward = copy.deepcopy(encoder._tokenizer), forward
    return own


def by_torch(encoder: SentenceEncoder):
    # The number of threads belongs to the thread that sets it.
    several = [with_forward(encoder, encoder.forward) for _ in range(THREADS)]
    return encoder.encode_queries, dealt(several, lambda: torch.set_num_threads(1))


def by_openvino(encoder: SentenceEncoder):
    class LastHiddenState(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = encoder.model

        def forward(self, input_ids, attention_mask):
            return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    example = {name: torch.ones(2, 8, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    converted = openvino.convert_model(LastHiddenState().eval(), example_input=example)

    def compiled(streams: int) -> list[SentenceEncoder]:
        given = {"INFERENCE_NUM_THREADS": THREADS, "NUM_STREAMS": streams, "INFERENCE_PRECISION_HINT": "f32"}
        model = openvino.Core().compile_model(converted, "CPU", given)
        return [with_request(model.create_infer_request()) for _ in range(streams)]

    def with_request(request) -> SentenceEncoder:
        def forward(batch):
            request.infer({name: batch[name].numpy() for name in example})
            return torch.from_numpy(request.get_output_tensor(0).data.astype(np.float32))

        return with_forward(encoder, forward)

    return compiled(1)[0].encode_queries, dealt(compiled(THREADS), lambda: None)


if __name__ == "__main__":
    main()
