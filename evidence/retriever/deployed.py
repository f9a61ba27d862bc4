"""The deployment on a Ray cluster of two raylets while a node is killed under load, beside one server.

    python evidence/retriever/deployed.py [--seconds 90] [--clients 4] [--rows 2000] [--json FILE]

Two shards with two replicas each. Every answer is compared with exact search. A third of the time one server
is asked, a third both nodes, and a third the one that is left once the other is killed (SIGKILL to all its processes).
Each client opens a connection for every query. The clients, both nodes and all else share the machine's cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))

from kit.ray_cluster import TOKEN, RayCluster, free_port  # noqa: E402
from kit.retriever_world import make_corpus, make_encoder  # noqa: E402
from kit.search_load import SearchLoad, oracle  # noqa: E402
from verl_credit_retriever.encoder import SentenceEncoder  # noqa: E402
from verl_credit_retriever.index.search import build_index  # noqa: E402
from verl_credit_retriever.launch import start_server  # noqa: E402

K = 5


def retriever(*arguments: object) -> str:
    environment = {**os.environ, **TOKEN, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "verl_credit_retriever.cli", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout


def numbers(load: SearchLoad, since: float, until: float) -> dict:
    """Of the right answers that came in that time."""
    times = [since, *(moment for moment in sorted(load.times) if since < moment <= until), until]
    gaps = [after - before for before, after in pairwise(times)]
    return {
        "answers_per_s": round((len(times) - 2) / (until - since), 1),
        "longest_gap_s": round(max(gaps), 2),
    }


def measure(url: str, world: Path, queries: list[str], exact: list[dict], clients: int, steps: list) -> dict:
    """The load over all steps, each (name, what happens at its start, seconds)."""
    marks = []
    with SearchLoad(url, queries, exact, K, clients) as load:
        for name, act, seconds in steps:
            marks.append((name, time.monotonic()))
            act()
            time.sleep(max(0.0, marks[-1][1] + seconds - time.monotonic()))
        marks.append(("end", time.monotonic()))
    parts = {name: numbers(load, since, until) for (name, since), (_, until) in pairwise(marks)}
    latencies = sorted(load.latencies_s)
    return {
        "right": load.seen["200"],
        "wrong": load.wrong[:5],
        "not_answered": {
            name: count for name, count in sorted(load.seen.items()) if name not in ("200", "wrong")
        },
        "first_text": {name: text for name, text in sorted(load.bodies.items()) if text},
        "p50_ms": round(1000 * latencies[len(latencies) // 2]),
        "p99_ms": round(1000 * latencies[len(latencies) * 99 // 100]),
        "parts": parts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    third, port = arguments.seconds / 3, free_port()
    with tempfile.TemporaryDirectory() as work:
        world = Path(work)
        encoder = make_encoder(world / "encoder")
        build_index(
            make_corpus(world / "corpus.jsonl", arguments.rows), SentenceEncoder(encoder), world / "index"
        )
        queries = [
            f"who is the mayor of town {town} born in river {river}"
            for town in range(500)
            for river in range(5)
        ]
        exact = oracle(world, queries, K)
        at = ["--index", world / "index", "--encoder", encoder, "--cache-entries", 0]
        ask = (world, queries, exact, arguments.clients)
        with start_server(
            world / "index", encoder, log_path=world / "log", options=["--cache-entries", "0"]
        ) as one:
            result = {"one server": measure(one.url, *ask, [("alone", lambda: None, third)])}
        with RayCluster(world / "nodes.log", ["--num-cpus=8"]) as cluster:
            began = time.monotonic()
            at += ["--address", cluster.address, "--port", port]
            print(retriever("deploy", *at, "--shards", 2, "--replicas", 2), end="", flush=True)
            result["deploy_s"] = round(time.monotonic() - began)
            steps = [("two nodes", lambda: None, third), ("one killed", cluster.kill_last, third)]
            result["deployed"] = measure(f"http://127.0.0.1:{port}", *ask, steps)
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
