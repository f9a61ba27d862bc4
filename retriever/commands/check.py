"""The command `verl-credit-retriever check`: its options and what it prints."""

import json
import sys
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from typer import Option

from verl_credit_retriever.options import Device, Threads, number
from verl_credit_retriever.serving.settings import TOKEN_VARIABLE, read_token


def check(
    url: Annotated[str, Option(help="base URL of a server; several with commas")],
    index: Annotated[Path, Option(help="the index folder that should be served")],
    encoder: Annotated[Path, Option(help="the encoder that built the index")],
    queries: Annotated[Path, Option(help='.txt (one a line) or .jsonl ("query" or "question")')],
    k: Annotated[str, Option(help="recall at these numbers of documents")] = "3,10",
    min_recall: Annotated[
        float | None,
        number("default: 0.99 for flat and exact, 0.95 for sq8, ivf, ivfpq and hnsw", parser=float),
    ] = None,
    nprobe: Annotated[int | None, number("as the servers use it (ivf, ivfpq); default: the index's")] = None,
    refine: Annotated[int | None, number("as the servers use it (ivfpq); default: the index's")] = None,
    ef_search: Annotated[int | None, number("as the servers use it (hnsw); default: the index's")] = None,
    token_file: Annotated[
        Path | None, Option(help=f"the servers' bearer token (or {TOKEN_VARIABLE})")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="print the report as JSON")] = False,
    device: Device = "cpu",
    threads: Threads = None,
):
    """Exit codes: 0 all is well, 1 the servers have a problem (each is a line on stderr), 2 a wrong argument."""
    ks, urls = _integers("--k", k), _urls(url)
    if min_recall is not None and not 0 <= min_recall <= 1:
        raise ValueError(f"--min-recall={min_recall}; expected 0 to 1")

    import torch
    import transformers

    from verl_credit_retriever.check import check_servers, read_queries
    from verl_credit_retriever.encoder import SentenceEncoder
    from verl_credit_retriever.index.search import SearchIndex

    texts = read_queries(queries)
    transformers.utils.logging.disable_progress_bar()
    if threads is not None:
        torch.set_num_threads(threads)
    search = {"nprobe": nprobe, "refine": refine, "ef_search": ef_search}
    exact = SearchIndex.load(index, backend="exact", mmap=True, **search)
    report = check_servers(
        urls,
        exact,
        SentenceEncoder.for_index(encoder, exact.manifest, device=device),
        texts,
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
