"""Does the memory of a search server come to rest? Its app in this process, without HTTP, under as many queries as a worker
answers in half an hour of `load.py`.

    python evidence/reliability/heap.py [--queries 80000] [--every 5000]

Between two lines 16 to 256 clients ask one question after the other; then nothing is under way, and freed memory is given
back. A line has what the process shares with nobody, what malloc has given out (`mallinfo2`, all threads), and the number of
Python's own blocks. Needs glibc.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import random
import sys
from pathlib import Path

import httpx
import psutil
import torch
from load import private
from results import RUNS
from towns import K, build

from verl_credit_retriever.encoder import SentenceEncoder
from verl_credit_retriever.http.server import create_app
from verl_credit_retriever.index.search import SearchIndex
from verl_credit_retriever.settings import Limits

ROWS, CLIENTS = 2000, (16, 64, 128, 256)
FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class MallInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS.split()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=RUNS / "load", help="of index and encoder")
    parser.add_argument("--queries", type=int, default=80_000)
    parser.add_argument("--every", type=int, default=5_000, help="queries between two lines")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder, encoder, queries, _ = build(options.work, ROWS)
    index = SearchIndex.load(folder)
    app = create_app(
        index, SentenceEncoder.for_index(encoder, index.manifest), limits=Limits(cache_entries=0)
    )
    asyncio.run(ask(app, queries, options.queries, options.every))


async def ask(app, queries: list[str], number: int, every: int) -> None:
    draw = random.Random(0)
    print(
        "| queries | private, MB | given out by malloc, MB | Python's blocks |", "|---|---|---|---|", sep="\n"
    )
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client,
    ):
        for asked in range(every, number + 1, every):
            left = iter(draw.choices(queries, k=every))

            async def one_after_the_other(left=left) -> None:
                for query in left:
                    body = {"queries": [query], "topk": K, "return_scores": True}
                    (await client.post("/retrieve", json=body)).raise_for_status()

            await asyncio.gather(*(one_after_the_other() for _ in range(draw.choice(CLIENTS))))
            print(line(asked), flush=True)


def line(asked: int) -> str:
    gc.collect()
    library = ctypes.CDLL(None)
    library.malloc_trim(0)
    library.mallinfo2.restype = MallInfo
    given_out = library.mallinfo2().uordblks / 1e6
    return f"| {asked:,} | {private(psutil.Process()) / 1e6:.1f} | {given_out:.2f} | {sys.getallocatedblocks():,} |"


if __name__ == "__main__":
    main()
