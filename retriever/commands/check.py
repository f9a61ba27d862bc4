"""The command `verl-credit-retriever check`: its options and what it prints."""

import json
import sys
from pathlib import Path
from urllib.parse import urlsplit

from typer import Option

from verl_credit_retriever.commands import DEVICE, THREADS
from verl_credit_retriever.serving.settings import TOKEN_VARIABLE, read_token


def check(
    url: str = Option(help="base URL of a server; several with commas"),
    index: Path = Option(help="the index folder that should be served"),
    encoder: Path = Option(help="the encoder that built the index"),
    queries: Path = Option(help='.txt (one a line) or .jsonl ("query" or "question")'),
    k: str = Option("3,10", help="recall at these numbers of documents"),
    min_recall: float | None = Option(
        None, parser=float, help="default: 0.99 for flat and exact, 0.95 for sq8, ivf, ivfpq and hnsw"
    ),
    nprobe: int | None = Option(
        None, parser=int, help="as the servers were told (ivf, ivfpq); default: the index's"
    ),
    refine: int | None = Option(
        None, parser=int, help="as the servers were told (ivfpq); default: the index's"
    ),
    ef_search: int | None = Option(
        None, parser=int, help="as the servers were told (hnsw); default: the index's"
    ),
    token_file: Path | None = Option(None, help=f"the servers' bearer token (or {TOKEN_VARIABLE})"),
    as_json: bool = Option(False, "--json", help="print the report as JSON"),
    device: str = DEVICE,
    threads: int | None = THREADS,
):
    """Exit codes: 0 all is well, 1 a problem was found (each is a line on stderr), 2 a wrong argument."""
    ks, urls = _integers("--k", k), _urls(url)
    if min_recall is not None and not 0 <= min_recall <= 1:
        raise ValueError(f"--min-recall={min_recall}; expected 0 to 1")

    import torch
    import transformers

    from verl_credit_retriever.check import check_servers, read_queries
    from verl_credit_retriever.encoder import SentenceEncoder
    from verl_credit_retriever.index.search import SearchIndex

    asked = read_queries(queries)
    transformers.utils.logging.disable_progress_bar()
    if threads is not None:
        torch.set_num_threads(threads)
    search = {"nprobe": nprobe, "refine": refine, "ef_search": ef_search}
    exact = SearchIndex.load(index, backend="exact", mmap=True, **search)
    report = check_servers(
        urls,
        exact,
        SentenceEncoder.for_index(encoder, exact.manifest, device=device),
        asked,
        ks=ks,
        min_recall=min_recall,
        token=read_token(token_file),
    )
    print(json.dumps(report, indent=2) if as_json else _table(report))
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
    lines.append(f"fingerprint  search.index_fingerprint={report['fingerprint']}")
    lines.append("PROBLEMS" if report["problems"] else "ok")
    return "\n".join(lines)
