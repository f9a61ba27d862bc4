"""The retriever with a trained encoder under 256 clients.

    python evidence/reliability/load.py [--minutes 30] [--clients 256] [--work DIR] [--json FILE] [--again]

The encoder is all-MiniLM-L6-v2 (`make weights`). It indexes generated articles, exact search says beforehand what every
query must find, and 256 clients send single queries, one after the other, without a pause and without a cache. A
client opens another connection after 50 answers or so. Counted: wrong answers, failed ones by status (a 429 or 503 has to
carry Retry-After), broken connections apart, and after a warm-up the memory of the server. A result that is there is not
measured again without --again. The clients run on the same cores as the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import psutil
import torch
from results import FOLDER, RUNS
from scipy import stats
from towns import K, build

from verl_credit_retriever.asking import MalformedAnswer, parse_served
from verl_credit_retriever.check import recall_at, wrong_score, wrong_text
from verl_credit_retriever.launch import start_server

SAMPLE_S = 2.0
WARM_UP_S = 120.0
"""Left out of the memory: the connections, and the code and buffers of each first batch, are there once."""
ANSWERS_PER_CONNECTION = 50
"""On average."""
PAUSE_S = 0.1
"""After a failed answer, as any client makes one."""


@dataclass
class Counts:
    """What came back."""

    statuses: Counter = field(default_factory=Counter)
    connections: Counter = field(default_factory=Counter)
    """Connections that broke or were refused, by httpx's name of the error."""
    undocumented: Counter = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)
    last_good: float = 0.0
    longest_gap_s: float = 0.0
    """Without any right answer."""


def problem(answer: httpx.Response, exact: dict, rows: int) -> str | None:
    """Why a 200 is not the answer to its query."""
    try:
        served = parse_served(answer.json(), K, rows)
    except (ValueError, RecursionError, MalformedAnswer) as error:
        return f"malformed: {error}"
    if recall_at(served, exact, K) < 1:
        return f"found {[hit.id for hit in served]}, expected {sorted(exact)}"
    return wrong_score(served, exact) or wrong_text(served, exact)


async def client(
    number: int, url: str, queries: list[str], exact: list[dict], rows: int, counts: Counts, until: float
) -> None:
    """One query after the other, each another one drawn from the client's own seed."""
    draw = random.Random(f"client {number}")
    async with httpx.AsyncClient(timeout=60, trust_env=False, verify=False) as http:
        while (begin := time.monotonic()) < until:
            place = draw.randrange(len(queries))
            body = {"queries": [queries[place]], "topk": K, "return_scores": True}
            try:
                last = draw.random() < 1 / ANSWERS_PER_CONNECTION
                headers = {"Connection": "close"} if last else {}
                answer = await http.post(f"{url}/retrieve", json=body, headers=headers)
            except httpx.TransportError as error:
                counts.connections[type(error).__name__] += 1
                await asyncio.sleep(PAUSE_S)
                continue
            now = time.monotonic()
            counts.statuses[str(answer.status_code)] += 1
            if answer.status_code != 200:
                if answer.status_code not in (429, 503) or "Retry-After" not in answer.headers:
                    counts.undocumented[f"{answer.status_code} {answer.text[:80]}"] += 1
                await asyncio.sleep(PAUSE_S)
            elif said := problem(answer, exact[place], rows):
                counts.wrong.append(f"{queries[place]!r}: {said}"[:300])
            else:
                counts.latencies_s.append(now - begin)
                counts.longest_gap_s = max(counts.longest_gap_s, now - max(counts.last_good, 0.0))
                counts.last_good = now


Sample = tuple[float, int]
"""Seconds, and the bytes that the server shares with nobody."""


def private(process: psutil.Process) -> int:
    """Resident bytes without the pages of files: those of the index are file cache."""
    found = process.memory_info()
    return found.rss - found.shared


async def sample(pid: int, samples: list[Sample], begin: float, until: float) -> None:
    while (now := time.monotonic()) < until:
        samples.append((now - begin, private(psutil.Process(pid))))
        await asyncio.sleep(SAMPLE_S)


def memory(seconds: np.ndarray, megabytes: np.ndarray, blocks: int = 20) -> dict:
    """Does it grow? A line by least squares through the means of equal parts of the time, with its 95 % interval.

    Flat: in the measured time the line grows by no more than the noise, the standard deviation of a sample from the line
    (or 0.1 MB, where there is none).
    """
    parts = [part for part in np.array_split(np.arange(len(seconds)), blocks) if len(part)]
    hours = seconds / 3600
    x, y = (np.array([values[part].mean() for part in parts]) for values in (hours, megabytes))
    fit = stats.linregress(x, y)
    half = stats.t.ppf(0.975, len(x) - 2) * fit.stderr
    noise = float(np.std(megabytes - fit.intercept - fit.slope * hours))
    grown = float(fit.slope * (hours[-1] - hours[0]))
    return {
        "flat": abs(grown) <= max(noise, 0.1),
        "grown_mb": round(grown, 2),
        "noise_mb": round(noise, 2),
        "mb_per_hour": round(float(fit.slope), 2),
        "mb_per_hour_95": [round(float(fit.slope - half), 2), round(float(fit.slope + half), 2)],
        "mean_mb": round(float(megabytes.mean()), 1),
        "largest_mb": round(float(megabytes.max()), 1),
        "part_means_mb": [round(float(value), 1) for value in y],
    }


async def storm(
    pid: int, url: str, queries: list[str], exact: list[dict], options: argparse.Namespace
) -> dict:
    counts, samples = Counts(), []
    begin = time.monotonic()
    until = begin + 60 * options.minutes
    counts.last_good = begin
    clients = (client(n, url, queries, exact, options.rows, counts, until) for n in range(options.clients))
    await asyncio.gather(*clients, sample(pid, samples, begin, until))
    took = time.monotonic() - begin
    seconds, resident = np.array([one for one in samples if one[0] >= WARM_UP_S]).T
    ordered = sorted(counts.latencies_s)
    at: Callable[[float], float] = lambda share: round(ordered[math.ceil(share * len(ordered)) - 1], 3)  # noqa: E731
    return {
        "seconds": round(took, 1),
        "requests": counts.statuses.total() + counts.connections.total(),
        "right_answers": len(ordered),
        "wrong_answers": len(counts.wrong),
        "first_wrong": counts.wrong[:5],
        "statuses": dict(sorted(counts.statuses.items())),
        "failed_otherwise_than_documented": dict(counts.undocumented.most_common(5)),
        "broken_connections": dict(sorted(counts.connections.items())),
        "answers_per_s": round(len(ordered) / took, 1),
        "p50_s": at(0.5),
        "p95_s": at(0.95),
        "p99_s": at(0.99),
        "longest_s": at(1.0),
        "longest_time_without_an_answer_s": round(counts.longest_gap_s, 2),
        "memory": {
            "of": "bytes that the process shares with nobody (without the pages of files)",
            "warm_up_s": WARM_UP_S,
            "server": memory(seconds, resident / 1e6),
        },
    }


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{named[0] if named else platform.machine()}, {os.cpu_count()} cores"


MEMORY = {"parent": "the parent", "oldest_worker": "the older worker", "server": "the server"}
"""The published measurement was of a server with two workers, which are killed."""


def table(report: dict) -> str:
    """The report for load.md."""

    def memory_of(process: str) -> str:
        found = report["memory"][process]
        low, high = found["mb_per_hour_95"]
        return (
            f"{found['mean_mb']:.0f} MB; grew by {found['grown_mb']:.1f} MB, noise {found['noise_mb']:.1f} MB "
            f"({found['mb_per_hour']:.0f} MB an hour, {low:.0f} to {high:.0f}): {'' if found['flat'] else '**not** '}flat"
        )

    times = {name: report[f"{name}_s"] for name in ("p50", "p99", "longest")}
    rows = {
        "right answers": f"{report['right_answers']:,}, {report['answers_per_s']:.0f} a second; "
        + ", ".join(f"{name} {value:.2f} s" for name, value in times.items()),
        "wrong answers": report["wrong_answers"],
        "failed as documented": sum(report["statuses"].get(status, 0) for status in ("429", "503"))
        - sum(
            n for said, n in report["failed_otherwise_than_documented"].items() if said[:3] in ("429", "503")
        ),
        "failed otherwise": report["failed_otherwise_than_documented"] or 0,
        "broken connections": f"{sum(report['broken_connections'].values())}"
        + (f", from {len(report['kills'])} killed workers" if "kills" in report else ""),
        "longest time without an answer": f"{report['longest_time_without_an_answer_s']:.2f} s",
        **{
            f"memory of {named}": memory_of(name)
            for name, named in MEMORY.items()
            if name in report["memory"]
        },
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--rows", type=int, default=2000, help="articles, and as many questions")
    parser.add_argument("--work", type=Path, default=RUNS / "load", help="for encoder and index; kept")
    parser.add_argument("--json", type=Path, default=FOLDER / "load.json")
    parser.add_argument("--again", action="store_true", help="measure again what is there")
    options = parser.parse_args()
    if 60 * options.minutes < 2 * WARM_UP_S:
        parser.error(
            f"--minutes={options.minutes:g}: at least {2 * WARM_UP_S / 60:g}, half of it is the warm-up"
        )
    if options.json.exists() and not options.again:
        print(f"{options.json} is there; --again measures again")
        return print(table(json.loads(options.json.read_text(encoding="utf-8"))))
    options.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    index, encoder, queries, exact = build(options.work, options.rows)
    no_cache = ["--cache-entries", "0"]
    with start_server(
        index, encoder, log_path=options.work / "server.log", ready_timeout=600, options=no_cache
    ) as server:
        result = asyncio.run(storm(server.pid, server.url, queries, exact, options))
        code = server.stop()
    command = f"python evidence/reliability/load.py --minutes {options.minutes:g} --clients {options.clients}"
    command += f" --rows {options.rows}"
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    machine = {"processor": processor(), **versions, "load_average_at_the_end": os.getloadavg()}
    settings = {"rows": options.rows, "queries": len(queries), "k": K, "cache": "off"}
    report = {"command": command, "machine": machine, **settings, **result, "exit_code_of_the_server": code}
    options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table(report))


if __name__ == "__main__":
    main()
