"""Compares our server with a plain one on the same machine, with the same encoder and index.

    python evidence/retriever/bench.py --work DIR [--rows 50000 500000] [--requests 320] [--rounds 2] [--json FILE]

Per index size, with an encoder of e5-base's shape (random weights): 64 clients that send single queries of 10 to 20
tokens, all different, ours and the plain server in turn (the cache is off); one request of 256 queries; the scores
of a query alone against the same in the batch. Then with a tiny encoder, checked answer by answer against exact
search: 20,000 requests from 64 clients, and an overloaded server with a short queue. FAISS flat, fp32, k = 3.
`--work` keeps encoders and indexes between runs (500,000 rows: about 2 GB).
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch
import transformers
from bench_world import SHAPES, make_encoder, make_index, make_queries
from load import Load, send_all

from verl_credit_retriever.check import exact_answers, recall_at, wrong_text
from verl_credit_retriever.encoder import SentenceEncoder
from verl_credit_retriever.index.search import SearchIndex
from verl_credit_retriever.launch import start_server

CLIENTS, K, BATCH, ALONE = 64, 3, 256, 32
TINY_ROWS, QUEUE = 2000, 16


@contextmanager
def ours(index: Path, encoder: Path, threads: int, log: Path, *options: str) -> Iterator[str]:
    with start_server(
        index, encoder, threads=threads, log_path=log, ready_timeout=600, options=list(options)
    ) as handle:
        yield handle.url


@contextmanager
def plain(index: Path, encoder: Path, threads: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as scratch:
        port_file = Path(scratch) / "port.json"
        command = [sys.executable, str(Path(__file__).with_name("plain_server.py")), "--index", str(index)]
        command += ["--encoder", str(encoder), "--port-file", str(port_file), "--threads", str(threads)]
        process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": str(threads)})
        try:
            while not port_file.exists():
                if process.poll() is not None:
                    raise RuntimeError(f"the plain server ended with code {process.returncode}")
                time.sleep(0.1)
            yield f"http://127.0.0.1:{json.loads(port_file.read_text())['port']}"
        finally:
            process.terminate()
            process.wait()


def ask(url: str, queries: list[str]) -> tuple[float, list[list[dict]]]:
    """Seconds and hits of one request."""
    body = {"queries": queries, "topk": K, "return_scores": True}
    start = time.perf_counter()
    answer = httpx.post(f"{url}/retrieve", json=body, timeout=600, trust_env=False)
    seconds = time.perf_counter() - start
    answer.raise_for_status()
    return seconds, answer.json()["result"]


def single_queries(url: str, rows: int, queries: list[str]) -> Load:
    load = asyncio.run(send_all([url], queries, K, rows=rows, concurrency=CLIENTS, timeout_s=600, keep=True))
    if set(load.statuses) != {"200"} or load.malformed:
        raise RuntimeError(f"{url} failed: {load.statuses} {load.malformed[:1]}")
    return load


def compare(work: Path, rows: int, options: argparse.Namespace) -> dict:
    """The two servers over one index: throughput, latencies, a batch, and whether they find the same documents."""
    encoder = make_encoder(work / options.encoder, options.encoder)
    index = make_index(work / f"index-{rows}", encoder, rows)
    runs: dict[str, list[Load]] = {"ours": [], "plain": []}
    batch_s: dict[str, list[float]] = {"ours": [], "plain": []}
    texts = make_queries(options.rounds * options.requests, seed=rows)
    batch = make_queries(BATCH, seed=rows + 1)
    with (
        ours(index, encoder, options.threads, work / "server.log", "--cache-entries", "0") as our_url,
        plain(index, encoder, options.threads) as plain_url,
    ):
        urls = {"ours": our_url, "plain": plain_url}
        for url in urls.values():
            ask(url, batch[:8])  # pages are read and buffers allocated
        same = 0
        for round_ in range(options.rounds):
            part = texts[round_ * options.requests : (round_ + 1) * options.requests]
            for name, url in urls.items():
                runs[name].append(single_queries(url, rows, part))
            found = [
                [[hit.id for hit in load.answers[place]] for place in range(len(part))]
                for load in (runs["ours"][-1], runs["plain"][-1])
            ]
            same += sum(a == b for a, b in zip(*found, strict=True))
        for _ in range(options.batch_repeats):
            for name, url in urls.items():
                seconds, hits = ask(url, batch)
                batch_s[name].append(seconds)
                if name == "ours":
                    together = hits
        alone = [ask(our_url, [query])[1][0] for query in batch[:ALONE]]
    differences = [
        abs(a["score"] - b["score"])
        for hits, others in zip(alone, together, strict=False)
        for a, b in zip(hits, others, strict=True)
    ]
    numbers = {name: _combined(loads) for name, loads in runs.items()}
    return {
        "rows": rows,
        "servers": {name: {**numbers[name], "batch_s": statistics.median(batch_s[name])} for name in numbers},
        "throughput_ratio": numbers["ours"]["answers_per_s"] / numbers["plain"]["answers_per_s"],
        "p99_ratio": numbers["ours"]["p99_ms"] / numbers["plain"]["p99_ms"],
        "batch_ratio": statistics.median(batch_s["ours"]) / statistics.median(batch_s["plain"]),
        "same_documents": same / len(texts),
        "alone_against_batch": max(differences),
        "alone_same_documents": all(
            [hit["document"] for hit in hits] == [hit["document"] for hit in others]
            for hits, others in zip(alone, together, strict=False)
        ),
    }


def _combined(loads: list[Load]) -> dict:
    """The rounds as one run."""
    return Load(
        wall_s=sum(load.wall_s for load in loads),
        latencies_s=[seconds for load in loads for seconds in load.latencies_s],
        statuses=sum((load.statuses for load in loads), start=Counter()),
    ).numbers()


def checked(work: Path, number: int, clients: int, threads: int, *server_options: str) -> dict:
    """`number` different single queries to a tiny encoder's index, every 200 compared with exact search."""
    encoder = make_encoder(work / "tiny", "tiny")
    index = make_index(work / "index-tiny", encoder, TINY_ROWS)
    queries = make_queries(number, seed=number)
    with ours(index, encoder, threads, work / "server.log", "--cache-entries", "0", *server_options) as url:
        load = asyncio.run(
            send_all([url], queries, K, rows=TINY_ROWS, concurrency=clients, timeout_s=120, keep=True)
        )
    vectors_N_D = SentenceEncoder(encoder).encode_queries(queries)
    exact = exact_answers(SearchIndex.load(index, backend="exact", mmap=True), vectors_N_D, K)
    wrong = [
        {"query": queries[place], "served": [(hit.id, hit.score) for hit in hits]}
        for place, hits in load.answers.items()
        if recall_at(hits, exact[place], K) < 1
        or any(abs(hit.score - exact[place][hit.id].score) > 1e-5 for hit in hits if hit.id in exact[place])
        or wrong_text(hits, exact[place]) is not None
    ]
    found = {"wrong_200": len(wrong) + len(load.malformed), "first_wrong": wrong[:3] + load.malformed[:3]}
    return {**load.numbers(), "clients": clients, **found}


def machine() -> dict:
    import faiss

    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "faiss": faiss.__version__,
        "loadavg": os.getloadavg(),
    }


def table(report: dict) -> str:
    lines = [
        "| rows | server | answers/s | p50 ms | p99 ms | 256 in one request |",
        "|---|---|---|---|---|---|",
    ]
    for size in report["sizes"]:
        for name, server in size["servers"].items():
            times = f"{server['p50_ms']:.0f} | {server['p99_ms']:.0f} | {server['batch_s']:.2f} s"
            lines.append(f"| {size['rows']} | {name} | {server['answers_per_s']:.1f} | {times} |")
        lines.append(
            f"| {size['rows']} | ours / plain | {size['throughput_ratio']:.2f} | | {size['p99_ratio']:.2f} | "
            f"{size['batch_ratio']:.2f} |"
        )
    lines.append("")
    for size in report["sizes"]:
        lines.append(
            f"{size['rows']} rows: the two servers name the same documents for {size['same_documents']:.2%} of "
            f"the queries; alone against in a batch: scores differ by at most {size['alone_against_batch']:.1e}, "
            f"documents {'the same' if size['alone_same_documents'] else 'NOT the same'}"
        )
    for name in ("reliability", "overload"):
        if part := report.get(name):
            lines.append(
                f"{name}: {part['requests']} requests, {part['clients']} clients, {part['answers_per_s']:.0f} "
                f"answers/s, statuses {part['statuses']}, wrong or malformed 200s: {part['wrong_200']}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for encoders and indexes")
    parser.add_argument("--rows", type=int, nargs="*", default=[50_000, 500_000])
    parser.add_argument("--encoder", default="e5-base", choices=SHAPES, help="its shape; tiny: for a test")
    parser.add_argument("--requests", type=int, default=320, help="single queries per server and round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batch-repeats", type=int, default=3)
    parser.add_argument("--reliability", type=int, default=20_000, help="requests; 0: leave out")
    parser.add_argument("--overload", type=int, default=5_000, help="requests; 0: leave out")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    transformers.utils.logging.disable_progress_bar()
    report = {"machine": machine(), "threads": options.threads, "clients": CLIENTS, "k": K}
    report["sizes"] = [compare(options.work, rows, options) for rows in options.rows]
    if options.reliability:
        report["reliability"] = checked(options.work, options.reliability, CLIENTS, options.threads)
    if options.overload:
        bound = ["--max-queue-queries", str(QUEUE), "--max-request-queries", str(QUEUE)]
        report["overload"] = checked(options.work, options.overload, 256, options.threads, *bound)
    print(table(report))
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
