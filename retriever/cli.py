"""Command line: `verl-credit-retriever index ...` and `verl-credit-retriever serve ...`."""

import argparse
import os
import sys
import time
from pathlib import Path

from .serve import LOOPBACK, run_server


def main(arguments: list[str] | None = None) -> int:
    """Exit codes: 0 done, 2 a wrong argument or input (one line says which), 4 the port is in use."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl-credit-retriever", description="Dense retrieval over a JSONL corpus."
    )
    commands = parser.add_subparsers(required=True, metavar="{index,serve}")
    defaults = argparse.ArgumentDefaultsHelpFormatter

    index = commands.add_parser("index", help="encode a corpus and write an index", formatter_class=defaults)
    index.set_defaults(run=_index)
    index.add_argument("--corpus", type=Path, required=True, help='JSONL of {"id", "contents"}')
    index.add_argument("--encoder", type=Path, required=True, help="Hugging Face encoder folder")
    index.add_argument("--out", type=Path, required=True, help="folder to create")
    index.add_argument("--kind", default="flat", choices=["flat"])
    index.add_argument("--batch-size", type=int, default=128)
    index.add_argument("--max-length", type=int, default=256, help="tokens kept of a text")
    index.add_argument("--query-prefix", default="query: ")
    index.add_argument("--passage-prefix", default="passage: ")
    index.add_argument("--overwrite", action="store_true", help="replace an existing index")
    _add_compute(index)

    serve = commands.add_parser("serve", help="answer POST /retrieve", formatter_class=defaults)
    serve.set_defaults(run=_serve)
    serve.add_argument("--index", type=Path, required=True)
    serve.add_argument("--encoder", type=Path, required=True, help="the encoder that built the index")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=8000, help="0 picks a free port")
    serve.add_argument("--port-file", type=Path, help="JSON {host, port, pid}, written when ready")
    serve.add_argument("--parent-pid", type=int, help="exit when this process ends")
    serve.add_argument("--allow-remote", action="store_true", help="allow a host other than loopback")
    serve.add_argument("--topk", type=int, default=3, help="documents per query when a request names none")
    _add_compute(serve)
    return parser


def _add_compute(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="torch device of the encoder")
    parser.add_argument("--threads", type=int, help="CPU threads; default: what torch takes")


def _index(options: argparse.Namespace) -> int:
    import torch
    import transformers

    from .encoder import SentenceEncoder
    from .index import build_index

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    transformers.utils.logging.disable_progress_bar()
    encoder = SentenceEncoder(
        options.encoder,
        query_prefix=options.query_prefix,
        passage_prefix=options.passage_prefix,
        max_length=options.max_length,
        device=options.device,
        batch_size=options.batch_size,
    )
    start = time.monotonic()

    def progress(rows: int) -> None:
        print(
            f"\r{rows} rows, {rows / max(time.monotonic() - start, 1e-9):.0f} rows/s", end="", file=sys.stderr
        )

    manifest = build_index(
        options.corpus,
        encoder,
        options.out,
        kind=options.kind,
        batch_size=options.batch_size,
        overwrite=options.overwrite,
        on_progress=progress,
    )
    print(file=sys.stderr)
    print(f"{options.out}: {manifest['rows']} rows of {manifest['dim']} dimensions")
    return 0


def _serve(options: argparse.Namespace) -> int:
    if options.host not in LOOPBACK:
        if not options.allow_remote:
            raise ValueError(
                f"--host={options.host}: not loopback; add --allow-remote to serve other machines"
            )
        print(
            f"warning: {options.host} is reachable by others, and there is no authentication", file=sys.stderr
        )
    if options.threads is not None:
        if options.threads < 1:
            raise ValueError(f"--threads={options.threads}; at least 1")
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
    return run_server(
        options.index,
        options.encoder,
        host=options.host,
        port=options.port,
        port_file=options.port_file,
        parent_pid=options.parent_pid,
        threads=options.threads,
        device=options.device,
        topk=options.topk,
    )


if __name__ == "__main__":
    sys.exit(main())
