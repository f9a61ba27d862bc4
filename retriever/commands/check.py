"""The command `verl-credit-retriever check`: its options and what it prints."""

import argparse
import json
import sys
from pathlib import Path
from urllib.parse import urlsplit

from verl_credit_retriever.serving.settings import TOKEN_VARIABLE, read_token


def add_check(commands, defaults: type) -> argparse.ArgumentParser:
    """Register `check` among the commands; returns its parser, to which device options may be added."""
    check = commands.add_parser(
        "check", help="compare what is served with exact search, and time it", formatter_class=defaults
    )
    check.set_defaults(run=run_check)
    check.add_argument("--url", required=True, help="base URL of a server; several with commas")
    check.add_argument("--index", type=Path, required=True, help="the index folder that should be served")
    check.add_argument("--encoder", type=Path, required=True, help="the encoder that built the index")
    check.add_argument(
        "--queries", type=Path, required=True, help='.txt (one a line) or .jsonl ("query" or "question")'
    )
    check.add_argument("--k", default="3,10", help="recall at these numbers of documents")
    check.add_argument("--concurrency", type=int, default=64, help="clients under load")
    check.add_argument("--requests", type=int, default=1000, help="requests under load; 0: no load")
    check.add_argument(
        "--min-recall", type=float, help="default: 0.99 for flat and exact, 0.95 for sq8, ivf and hnsw"
    )
    check.add_argument("--nprobe", type=int, help="as the servers were told (ivf); default: the index's")
    check.add_argument("--ef-search", type=int, help="as the servers were told (hnsw); default: the index's")
    check.add_argument("--token-file", type=Path, help=f"the servers' bearer token (or {TOKEN_VARIABLE})")
    check.add_argument("--json", action="store_true", help="print the report as JSON")
    return check


def run_check(options: argparse.Namespace) -> int:
    """Exit codes: 0 all is well, 1 a problem was found (each is a line on stderr), 2 a wrong argument."""
    ks, urls = _integers("--k", options.k), _urls(options.url)
    if options.min_recall is not None and not 0 <= options.min_recall <= 1:
        raise ValueError(f"--min-recall={options.min_recall}; expected 0 to 1")

    import torch
    import transformers

    from verl_credit_retriever.check.report import check_servers, read_queries
    from verl_credit_retriever.encoder.encoder import SentenceEncoder
    from verl_credit_retriever.index.search import SearchIndex

    queries = read_queries(options.queries)
    transformers.utils.logging.disable_progress_bar()
    if options.threads is not None:
        if options.threads < 1:
            raise ValueError(f"--threads={options.threads}; at least 1")
        torch.set_num_threads(options.threads)
    search = {"nprobe": options.nprobe, "ef_search": options.ef_search}
    index = SearchIndex.load(options.index, backend="exact", mmap=True, **search)
    encoder = SentenceEncoder.for_index(options.encoder, index.manifest, device=options.device)
    report = check_servers(
        urls,
        index,
        encoder,
        queries,
        ks=ks,
        concurrency=options.concurrency,
        requests=options.requests,
        min_recall=options.min_recall,
        token=read_token(options.token_file),
    )
    print(json.dumps(report, indent=2) if options.json else _table(report))
    for problem in report["problems"]:
        print(f"problem: {problem}", file=sys.stderr)
    return 1 if report["problems"] else 0


def _integers(key: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{key}={text!r}; expected integers with commas, such as 3,10") from None


def _urls(text: str) -> list[str]:
    urls = [url.strip().rstrip("/").removesuffix("/retrieve") for url in text.split(",") if url.strip()]
    for url in urls or [text]:
        parts = urlsplit(url)
        if "@" in parts.netloc:
            raise ValueError("--url: holds a user or password; give a token with --token-file instead")
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f"--url={url!r}; expected http://HOST:PORT")
    return list(dict.fromkeys(urls))


def _table(report: dict) -> str:
    lines = [f"index        {report['kind']}, {report['rows']} rows; {report['queries']} queries"]
    for url, server in report["servers"].items():
        recall = "  ".join(f"recall@{k} {value:.4f}" for k, value in server["recall"].items())
        same = "as the folder" if server["fingerprint"] == report["fingerprint"] else "NOT the folder's"
        lines += [f"{url}", f"  {recall}  (against exact search)"]
        if server["max_score_error"] is not None:
            lines.append(f"  largest score error {server['max_score_error']:.2g}")
        lines.append(f"  fingerprint {same}")
    if load := report.get("load"):
        times = ", ".join(f"{p} {_ms(load[f'{p}_ms'])}" for p in ("p50", "p95", "p99"))
        counts = ", ".join(f"{count} x {status}" for status, count in load["statuses"].items())
        lines += [
            f"load         {load['requests']} single queries, {load['concurrency']} at a time: {counts}",
            f"             {load['answers_per_s']:.1f} answers/s; {times}",
        ]
    lines.append(f"fingerprint  search.index_fingerprint={report['fingerprint']}")
    lines.append("PROBLEMS" if report["problems"] else "ok")
    return "\n".join(lines)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"
