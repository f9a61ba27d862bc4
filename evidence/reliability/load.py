"""The retriever with a trained encoder under 256 clients, while its workers are killed.

    python evidence/reliability/load.py [--minutes 30] [--clients 256] [--work DIR] [--json FILE] [--again]

The encoder is all-MiniLM-L6-v2 (`make weights`). It indexes generated articles, exact search says beforehand what every
query must find, and 256 clients send single queries, one after the other, without a pause and without a cache. Meanwhile the
youngest worker is killed (SIGKILL) at random times from a seed. Counted: wrong answers, failed ones by status (a 429 or 503
has to carry Retry-After), broken connections apart, and the memory of the parent and the oldest worker with its slope over
time. A result that is there is not measured again without --again. The clients run on the same cores as the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import psutil
import torch
from scipy import stats

from verl_credit.real.build import RealPaths, build_encoder
from verl_credit_retriever.check.recall import (
    MalformedAnswer,
    exact_answers,
    parse_served,
    recall_at,
    wrong_score,
    wrong_text,
)
from verl_credit_retriever.encoder.encoder import SentenceEncoder
from verl_credit_retriever.index.search import SearchIndex
from verl_credit_retriever.launch import start_server

HERE = Path(__file__).resolve().parent
K = 3
KILL_EVERY_S, QUIET_S = 60.0, 15.0
"""Mean pause between kills, and the shortest one."""
SAMPLE_S = 2.0
PAUSE_S = 0.1
"""After a failed answer, as any client makes one."""
SYLLABLES = (
    "ka",
    "vel",
    "mor",
    "sa",
    "rin",
    "to",
    "bel",
    "du",
    "nar",
    "li",
    "gos",
    "pe",
    "tha",
    "wen",
    "zu",
    "fro",
)


def name(draw: random.Random) -> str:
    return "".join(draw.choices(SYLLABLES, k=draw.choice((2, 3)))).capitalize()


def articles(rows: int) -> list[dict]:
    """Short articles of towns: different, and all of one kind, so that a wrong one would be near."""
    draw, found = random.Random(0), []
    for row in range(rows):
        town, river, mayor, trade = (
            name(draw),
            name(draw),
            name(draw),
            draw.choice(("salt", "bells", "glass", "wool", "ships")),
        )
        text = f"{town} is a town on the river {river}, founded in {draw.randint(900, 1900)}. "
        text += f"Its mayor is {mayor} {name(draw)}. The town is known for its {trade} and for the bridge of {name(draw)}."
        found.append(
            {"id": str(row), "contents": f"{town} ({row})\n{text}", "asked": (town, river, mayor, trade)}
        )
    return found


def questions(found: list[dict], number: int) -> list[str]:
    draw, asked = random.Random(1), set()
    forms = (
        "Who is the mayor of {0}?",
        "Which town lies on the river {1}?",
        "Where is {2} the mayor?",
        "Who makes {3} in {0}?",
    )
    while len(asked) < number:
        asked.add(draw.choice(forms).format(*draw.choice(found)["asked"]))
    return sorted(asked)


def build(work: Path, rows: int) -> tuple[Path, Path, list[str], list[dict]]:
    """(index, encoder, queries, what exact search finds for each); kept in ``work``."""
    paths = RealPaths(work)
    build_encoder(paths, lambda share, text: None)
    found = articles(rows)
    index = work / f"index-{rows}"
    if not (index / "manifest.json").exists():
        corpus = work / "corpus.jsonl"
        lines = [json.dumps({key: row[key] for key in ("id", "contents")}) + "\n" for row in found]
        corpus.write_text("".join(lines), encoding="utf-8")
        command = [sys.executable, "-m", "verl_credit_retriever.cli", "index", "--corpus", str(corpus)]
        command += [
            "--encoder",
            str(paths.encoder),
            "--out",
            str(index),
            "--query-prefix",
            "",
            "--passage-prefix",
            "",
        ]
        subprocess.run([*command, "--overwrite"], check=True, stdout=subprocess.DEVNULL)
    queries = questions(found, rows)
    encoder = SentenceEncoder(paths.encoder, query_prefix="", passage_prefix="")
    vectors_N_D = encoder.encode_queries(queries)
    exact = exact_answers(SearchIndex.load(index, backend="exact", mmap=True), vectors_N_D, K)
    return index, paths.encoder, queries, exact


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
                answer = await http.post(f"{url}/retrieve", json=body)
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


def workers_of(pid: int) -> list[psutil.Process]:
    """The oldest first; those that are ending are none."""
    try:
        found = psutil.Process(pid).children()
        return sorted(
            (one for one in found if one.status() != psutil.STATUS_ZOMBIE), key=lambda one: one.create_time()
        )
    except psutil.Error:
        return []


async def kill(pid: int, workers: int, seed: int, kills: list[dict], begin: float, until: float) -> None:
    """Kills the youngest worker at random times, when all are there again."""
    draw = random.Random(f"kills {seed}")
    while True:
        pause = QUIET_S + draw.expovariate(1 / (KILL_EVERY_S - QUIET_S))
        if time.monotonic() + pause > until - QUIET_S:
            return
        await asyncio.sleep(pause)
        there = workers_of(pid)
        if len(there) < workers:
            continue
        os.kill(there[-1].pid, signal.SIGKILL)
        at = time.monotonic()
        while len(workers_of(pid)) < workers or there[-1].pid in [one.pid for one in workers_of(pid)]:
            await asyncio.sleep(0.05)
        kills.append({"at_s": round(at - begin, 1), "replaced_after_s": round(time.monotonic() - at, 2)})


async def sample(pid: int, samples: list[tuple[float, int, int]], begin: float, until: float) -> None:
    """(seconds, resident bytes, those of them that are shared with nobody) of the parent and the oldest worker together."""
    while (now := time.monotonic()) < until:
        try:
            infos = [one.memory_info() for one in (psutil.Process(pid), *workers_of(pid)[:1])]
            samples.append((now - begin, sum(i.rss for i in infos), sum(i.rss - i.shared for i in infos)))
        except psutil.Error:
            pass
        await asyncio.sleep(SAMPLE_S)


def slope(seconds: np.ndarray, megabytes: np.ndarray, blocks: int = 30) -> dict:
    """MB per hour by least squares over means of ``blocks`` equal parts, with its 95 % interval."""
    parts = [part for part in np.array_split(np.arange(len(seconds)), blocks) if len(part)]
    x = np.array([seconds[part].mean() / 3600 for part in parts])
    y = np.array([megabytes[part].mean() for part in parts])
    fit = stats.linregress(x, y)
    half = stats.t.ppf(0.975, len(x) - 2) * fit.stderr
    return {
        "slope_mb_per_hour": round(float(fit.slope), 3),
        "interval": [round(float(fit.slope - half), 3), round(float(fit.slope + half), 3)],
        "first_mb": round(float(y[0]), 1),
        "last_mb": round(float(y[-1]), 1),
        "blocks": len(x),
    }


async def storm(
    pid: int, url: str, queries: list[str], exact: list[dict], options: argparse.Namespace
) -> dict:
    counts, kills, samples = Counts(), [], []
    begin = time.monotonic()
    until = begin + 60 * options.minutes
    counts.last_good = begin
    clients = (client(n, url, queries, exact, options.rows, counts, until) for n in range(options.clients))
    await asyncio.gather(
        *clients,
        kill(pid, options.workers, options.seed, kills, begin, until),
        sample(pid, samples, begin, until),
    )
    took, warm = time.monotonic() - begin, 0.1 * 60 * options.minutes
    seconds, rss, own = (np.array(column, dtype=np.float64) for column in zip(*samples, strict=True))
    kept = seconds >= warm
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
        "kills": kills,
        "memory": {
            "of": "the parent and the oldest worker, which is not killed; the first tenth of the time left out",
            "resident": slope(seconds[kept], rss[kept] / 1e6),
            "shared_with_nobody": slope(seconds[kept], own[kept] / 1e6),
        },
    }


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{named[0] if named else platform.machine()}, {os.cpu_count()} cores"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=2000, help="articles, and as many questions")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/reliability/load"), help="for encoder and index; kept"
    )
    parser.add_argument("--json", type=Path, default=HERE / "load.json")
    parser.add_argument("--again", action="store_true", help="measure again what is there")
    options = parser.parse_args()
    if options.json.exists() and not options.again:
        print(f"{options.json} is there; --again measures again")
        return
    options.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    index, encoder, queries, exact = build(options.work, options.rows)
    no_cache = ["--cache-entries", "0", "--workers", str(options.workers)]
    with start_server(
        index, encoder, log_path=options.work / "server.log", ready_timeout=600, options=no_cache
    ) as server:
        result = asyncio.run(storm(server.pid, server.url, queries, exact, options))
        code = server.stop()
    command = f"python evidence/reliability/load.py --minutes {options.minutes:g} --clients {options.clients}"
    command += f" --workers {options.workers} --rows {options.rows} --seed {options.seed}"
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    machine = {"processor": processor(), **versions, "load_average_at_the_end": os.getloadavg()}
    settings = {"rows": options.rows, "queries": len(queries), "k": K, "cache": "off"}
    report = {"command": command, "machine": machine, **settings, **result, "exit_code_of_the_server": code}
    options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in report.items() if key != "kills"}, indent=1))
    print(f"{len(result['kills'])} workers killed")


if __name__ == "__main__":
    main()
