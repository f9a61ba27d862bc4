"""How many right answers a second a full server gives to clients that do not wait before they ask again.

    python evidence/retriever/overload.py [--clients 256] [--queue 64] [--queries 4000] [--rounds 3] [--json FILE]

The encoder is all-MiniLM-L6-v2 (`make weights`) over 2,000 generated articles; no cache, one server process. In each round
as many clients as the queue has room for send single queries (the peak), then more clients, which send a refused query
again at once, whatever Retry-After says. Every answer is compared with exact search. The clients are one process, and run
on the cores of the server.
"""

import argparse
import asyncio
import json
import math
import os
import statistics
import sys
from pathlib import Path

import torch
from load import Load, send_all

from verl_credit_retriever.check import recall_at, wrong_score, wrong_text
from verl_credit_retriever.launch import start_server

sys.path.append(str(Path(__file__).resolve().parents[1] / "reliability"))
from towns import K, build

ROWS = 2000


def wrong(load: Load, places: list[int], exact: list[dict]) -> int:
    """Answers that are not those of exact search."""
    found = ((hits, exact[places[at]]) for at, hits in load.answers.items())
    return len(load.malformed) + sum(
        recall_at(hits, right, K) < 1 or bool(wrong_score(hits, right) or wrong_text(hits, right))
        for hits, right in found
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--queue", type=int, default=64)
    parser.add_argument("--queries", type=int, default=4000, help="per part of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--work", type=Path, default=Path("runs/reliability/load"), help="encoder and index; kept"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    index, encoder, queries, exact = build(options.work, ROWS)
    places = [place % len(queries) for place in range(options.queries)]

    def measure(url: str, clients: int) -> dict:
        load = asyncio.run(
            send_all(
                [url], [queries[place] for place in places], K, rows=ROWS, concurrency=clients,
                timeout_s=120, busy_s=math.inf, busy_pause_s=0, keep=True,
            )
        )  # fmt: skip
        return {**load.numbers(), "refused": load.asked_again, "wrong": wrong(load, places, exact)}

    limits = [
        "--max-queue-queries",
        options.queue,
        "--max-request-queries",
        options.queue,
        "--cache-entries",
        0,
    ]
    rounds = []
    log = options.work / "server.log"
    with start_server(index, encoder, log_path=log, ready_timeout=600, options=[*map(str, limits)]) as server:
        measure(server.url, options.queue)  # pages are read and buffers allocated
        for _ in range(options.rounds):
            peak, overload = measure(server.url, options.queue), measure(server.url, options.clients)
            rounds.append({"peak": peak, "overload": overload})
            rounds[-1]["share"] = overload["answers_per_s"] / peak["answers_per_s"]
            for name in ("peak", "overload"):
                part = rounds[-1][name]
                print(
                    f"{name}: {part['answers_per_s']:.1f} answers/s, p99 {part['p99_ms'] / 1000:.2f} s, "
                    f"{part['refused'] / part['seconds']:.0f} refused/s, {part['statuses']}, wrong {part['wrong']}",
                    flush=True,
                )
    share = statistics.median(one["share"] for one in rounds)
    print(f"overload / peak: {share:.2f} (median of {[round(one['share'], 2) for one in rounds]})")
    if options.json:
        settings = {"clients": options.clients, "queue": options.queue, "loadavg": os.getloadavg()}
        options.json.write_text(json.dumps({**settings, "share": share, "rounds": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
