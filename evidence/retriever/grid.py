"""Our search server beside Search-R1's own: rows x clients x queries in a request, in queries a second and in p99.

    git clone https://github.com/PeterGriffinJin/Search-R1
    python evidence/retriever/grid.py --work DIR --search-r1 Search-R1/search_r1/search/retrieval_server.py

Search-R1's file runs as it is: a launcher, before it, makes `.cuda()` the identity, for a machine without a GPU, and gives
uvicorn a free port. It computes in fp16, which a CPU does at a third of the speed of fp32, so `.half()` is the identity too
(server `search-r1`) or is not (`search-r1-fp16`). Ours runs once for each engine of `--servers`, with its cache off.

All have the same encoder (e5-base's shape, random weights), the same FAISS flat index, --threads threads and k = 3. For an
index all of them run at the same time and are measured in turn, in two rounds, so that noise of the machine hits each. A
client sends its next request when it has its answer; queries of 10 to 20 tokens, all that are under way different. A cell
ends after --seconds, or when each client has an answer. A cell that would take the slowest server above --longest has
fewer clients ("sent by"), which are the same for all servers; it is left out where that is the cell before it.

Each cell is appended to DIR/grid.jsonl, and is not measured again by the next start. The table is printed at the end, or by
--table at once. DIR keeps the encoder and the indexes (1,000,000 rows: 4 GB, and as much memory for each server).
"""

import argparse
import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import torch
from bench_world import SHAPES, make_encoder, make_index, make_queries

from verl_credit_retriever.launch import start_server
from verl_credit_retriever.settings import ENGINES

K, ROUNDS, POOL, START_S = 3, 2, 1 << 14, 600
THEIRS = {"search-r1": "fp32", "search-r1-fp16": "fp16"}
LAUNCHER = """
import runpy, sys, torch, uvicorn
file, precision, port, *rest = sys.argv[1:]
torch.nn.Module.cuda = torch.Tensor.cuda = lambda self: self
if precision == "fp32":
    torch.nn.Module.half = lambda self: self
run = uvicorn.run
uvicorn.run = lambda app, **_: run(app, host="127.0.0.1", port=int(port))
sys.argv = [file, *rest]
runpy.run_path(file, run_name="__main__")
"""


@contextmanager
def search_r1(options, name: str, index: Path, encoder: Path, log: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", LAUNCHER, options.search_r1]
    command += [
        THEIRS[name],
        port,
        "--index_path",
        index / "index.faiss",
        "--corpus_path",
        index / "corpus.jsonl",
    ]
    command += ["--topk", K, "--retriever_name", "e5", "--retriever_model", encoder]
    environment = {
        "OMP_NUM_THREADS": str(options.threads),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(options.work / "hf"),
    }
    with open(log, "ab") as output:
        process = subprocess.Popen(
            list(map(str, command)), env=os.environ | environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        until = time.monotonic() + START_S
        while not answers(port):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"Search-R1's server does not answer; see {log}")
            time.sleep(0.2)
        yield port
    finally:
        process.kill()  # it would wait for what is under way
        process.wait()


def answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def ours(options, name: str, index: Path, encoder: Path, log: Path):
    more = ["--cache-entries=0", "--max-queue-queries=65536", f"--encode-with={name}"]
    with start_server(
        index, encoder, threads=options.threads, log_path=log, ready_timeout=START_S, topk=K, options=more
    ) as server:
        yield int(server.url.rpartition(":")[2])


class Client:
    """One connection that stays open; the least that HTTP needs, so that the servers have the processor."""

    def __init__(self, port: int):
        self.port, self.streams = port, None

    async def ask(self, queries: list[str]) -> tuple[int, bytes]:
        body = json.dumps({"queries": queries, "topk": K, "return_scores": True}).encode()
        head = f"POST /retrieve HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nContent-Type: application/json\r\n"
        if self.streams is None:
            self.streams = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24)
        reader, writer = self.streams
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(answer.partition("content-length:")[2].partition("\r\n")[0])
        return int(answer.split()[1]), await reader.readexactly(length)


async def load(port: int, clients: int, size: int, seconds: float, texts) -> dict:
    """The seconds of all requests with answer 200, how many had another, and the wall clock."""
    taken, failed, start = [], 0, time.perf_counter()

    async def work() -> None:
        nonlocal failed
        client, more = Client(port), True
        while more:
            begun = time.perf_counter()
            status, _ = await client.ask(list(itertools.islice(texts, size)))
            ended = time.perf_counter()
            if status == 200:
                taken.append(ended - begun)
            failed += status != 200
            more = ended - start < seconds
        client.streams[1].close()

    await asyncio.gather(*(work() for _ in range(clients)))
    return {"taken": taken, "failed": failed, "wall": time.perf_counter() - start}


def documents(port: int, queries: list[str]) -> list[list[str]]:
    status, body = asyncio.run(Client(port).ask(queries))
    if status != 200:
        raise RuntimeError(f"status {status}: {body[:200]!r}")
    return [[hit["document"]["id"] for hit in hits] for hits in json.loads(body)["result"]]


def measure(options, rows: int, done: dict, keep) -> None:
    """All cells of one index that are not in `done`."""
    names = options.servers
    cells = list(itertools.product(options.clients, options.queries))
    if all((rows, *cell, name) in done for cell in cells for name in names):
        return
    encoder = make_encoder(options.work / options.encoder, options.encoder)
    index = make_index(options.work / f"index-{rows}", encoder, rows)
    need = len(names) * (
        (index / "index.faiss").stat().st_size + 3 * (encoder / "model.safetensors").stat().st_size
    )
    if (free := psutil.virtual_memory().available) < need:
        raise SystemExit(
            f"{len(names)} servers may need {need >> 20} MiB; {free >> 20} are free: fewer --servers"
        )
    texts = itertools.cycle(make_queries(POOL, seed=rows))
    with ExitStack() as stack:
        ports = {
            name: stack.enter_context(
                (search_r1 if name in THEIRS else ours)(
                    options, name, index, encoder, options.work / f"{name}.log"
                )
            )
            for name in names
        }
        found = {name: documents(port, make_queries(128, seed=1)) for name, port in ports.items()}
        for name in names:
            same = sum(a == b for a, b in zip(found[names[0]], found[name], strict=True)) / 128
            print(
                f"{rows} rows: {name} has the {K} documents of {names[0]} for {same:.1%} of 128 queries",
                flush=True,
            )
        for number, (clients, size) in enumerate(cells):
            before = [
                done.get((rows, fewer, size, name))
                for fewer in options.clients
                if fewer < clients
                for name in names
            ]
            before = [cell for cell in before if cell]
            pace = min((cell["queries_s"] for cell in before), default=None)
            sent_by = clients if pace is None else min(clients, max(2, int(options.longest * pace / size)))
            if any(cell["sent_by"] >= sent_by for cell in before):
                print(
                    f"{rows} rows, {clients} clients, {size} queries: left out, above {options.longest} s",
                    flush=True,
                )
                continue
            wanted = [name for name in names if (rows, clients, size, name) not in done]
            loads = {name: [] for name in wanted}
            for round_ in range(ROUNDS):
                for name in wanted if (number + round_) % 2 else reversed(wanted):
                    if sum(one["wall"] for one in loads[name]) < options.seconds:
                        half = options.seconds / ROUNDS
                        loads[name].append(asyncio.run(load(ports[name], sent_by, size, half, texts)))
            for name, parts in loads.items():
                taken = sorted(seconds for part in parts for seconds in part["taken"])
                keep({
                    "rows": rows, "clients": clients, "queries": size, "server": name, "sent_by": sent_by,
                    "requests": len(taken), "failed": sum(part["failed"] for part in parts),
                    "queries_s": round(len(taken) * size / sum(part["wall"] for part in parts), 3),
                    "p50_s": round(taken[len(taken) // 2], 4), "p99_s": round(taken[int(0.99 * len(taken))], 4),
                    "load": os.getloadavg()[0], "threads": options.threads, "encoder": options.encoder,
                })  # fmt: skip


def table(done: dict, options) -> str:
    """Ratios to the first server: throughput, and its p99 over ours, so that more is better in both."""
    base, *others = options.servers
    lines = [
        f"| rows | clients | queries | {base}: queries/s, p99 | "
        + " | ".join(others)
        + " | failed | sent by |"
    ]
    lines.append("|---" * (6 + len(others)) + "|")
    for rows, clients, size in itertools.product(options.rows, options.clients, options.queries):
        first = done.get((rows, clients, size, base))
        cells = [done.get((rows, clients, size, name)) for name in others]
        if first is None or None in cells:
            continue
        ratios = [
            f"{cell['queries_s'] / first['queries_s']:.2f}, {first['p99_s'] / cell['p99_s']:.2f}"
            for cell in cells
        ]
        failed = (
            ", ".join(str(cell["failed"]) for cell in (first, *cells))
            if any(c["failed"] for c in (first, *cells))
            else ""
        )
        fewer = first["sent_by"] if first["sent_by"] < clients else ""
        lines.append(
            f"| {rows} | {clients} | {size} | {first['queries_s']:.1f}, {first['p99_s']:.2f} s | "
            f"{' | '.join(ratios)} | {failed} | {fewer} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--search-r1", type=Path, help="its search_r1/search/retrieval_server.py")
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000, 50_000, 500_000, 1_000_000])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 8, 64, 512], help="in a request")
    parser.add_argument(
        "--servers",
        nargs="+",
        choices=(*THEIRS, *ENGINES),
        default=["search-r1", "torch", "openvino"],
    )
    parser.add_argument("--encoder", default="e5-base", choices=SHAPES, help="its shape; tiny: for a test")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="of a cell, unless its requests take longer"
    )
    parser.add_argument(
        "--longest", type=float, default=25.0, help="seconds in which each client has an answer"
    )
    parser.add_argument("--table", action="store_true", help="print what is there")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    file, done = options.work / f"grid-{options.encoder}.jsonl", {}

    def take(cell: dict) -> None:
        done[cell["rows"], cell["clients"], cell["queries"], cell["server"]] = cell

    def keep(cell: dict) -> None:
        take(cell)
        with open(file, "a") as lines:
            lines.write(json.dumps(cell) + "\n")

    if file.exists():
        for line in file.read_text().splitlines():
            take(json.loads(line))
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers end, too
    for rows in [] if options.table else options.rows:
        measure(options, rows, done, keep)
    print(table(done, options))


if __name__ == "__main__":
    main()
