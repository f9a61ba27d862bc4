"""`verl-credit-retriever index`: its options, and the line that shows how far it is."""

import argparse
import sys
import time
from pathlib import Path

from verl_credit_retriever.encoder.settings import POOLINGS
from verl_credit_retriever.index.manifest import DTYPES, KINDS
from verl_credit_retriever.index.progress import Progress

PARAMETERS = {
    "nlist": "ivf: number of lists (default: 4·√rows, at most rows / 39)",
    "train_rows": "ivf: rows that the lists are learnt from (default: 64 per list)",
    "nprobe": "ivf: lists read per query (default: √lists, at least 8)",
    "m": "hnsw: links per row and level (default: 32)",
    "ef_construction": "hnsw: candidates while building (default: 200)",
    "ef_search": "hnsw: candidates per query (default: 128)",
    "seed": "ivf, hnsw: of sampling, k-means and levels (default: 0)",
}
LINE_SECONDS = 10.0  # between progress lines where the line cannot be rewritten in place


def add_index(commands, formatter_class) -> argparse.ArgumentParser:
    """Register the command; the caller adds --device and --threads."""
    index = commands.add_parser(
        "index", help="encode a corpus and write an index", formatter_class=formatter_class
    )
    index.set_defaults(run=run_index)
    index.add_argument("--corpus", type=Path, required=True, help='JSONL of {"id", "contents"}')
    index.add_argument("--encoder", type=Path, required=True, help="Hugging Face encoder folder")
    index.add_argument("--out", type=Path, required=True, help="folder to create")
    index.add_argument("--kind", default="flat", choices=KINDS, help="exact needs no FAISS")
    index.add_argument("--dtype", default="fp32", choices=list(DTYPES), help="of the stored vectors")
    for name, text in PARAMETERS.items():
        index.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=argparse.SUPPRESS, metavar="N", help=text
        )
    index.add_argument("--gpu", action="store_true", help="learn ivf's lists on a GPU; needs faiss-gpu-cu12")
    index.add_argument("--batch-size", type=int, default=128, help="texts per call of the encoder")
    index.add_argument("--shard-rows", type=int, default=20_000, help="rows encoded between two savings")
    index.add_argument("--max-length", type=int, default=256, help="tokens kept of a text")
    index.add_argument("--query-prefix", default="query: ")
    index.add_argument("--passage-prefix", default="passage: ")
    index.add_argument(
        "--pooling",
        default=argparse.SUPPRESS,
        choices=POOLINGS,
        help="default: what sentence-transformers' files in the encoder's folder say, else mean (e5)",
    )
    index.add_argument("--no-normalize", action="store_true", help="keep the vectors' lengths")
    index.add_argument("--overwrite", action="store_true", help="replace an index or an interrupted build")
    return index


def run_index(options: argparse.Namespace) -> int:
    import torch
    import transformers

    from verl_credit_retriever.encoder.encoder import SentenceEncoder
    from verl_credit_retriever.index.build import build_index
    from verl_credit_retriever.index.memory import plan_memory

    if options.threads is not None:
        if options.threads < 1:
            raise ValueError(f"--threads={options.threads}; at least 1")
        torch.set_num_threads(options.threads)
        _set_faiss_threads(options.kind, options.threads)
    transformers.utils.logging.disable_progress_bar()
    if options.device == "cpu" and torch.cuda.is_available():
        print("encoding on the CPU although torch sees a GPU: --device cuda uses it", file=sys.stderr)
    encoder = SentenceEncoder(
        options.encoder,
        query_prefix=options.query_prefix,
        passage_prefix=options.passage_prefix,
        max_length=options.max_length,
        pooling=getattr(options, "pooling", None),
        normalize=not options.no_normalize,
        device=options.device,
        batch_size=options.batch_size,
    )
    for note in encoder.notes:
        print(f"note: {note}", file=sys.stderr)
    line = ProgressLine(sys.stderr)
    manifest = build_index(
        options.corpus,
        encoder,
        options.out,
        kind=options.kind,
        dtype=options.dtype,
        batch_size=options.batch_size,
        shard_rows=options.shard_rows,
        overwrite=options.overwrite,
        gpu=options.gpu,
        on_progress=line.show,
        **{name: getattr(options, name, None) for name in PARAMETERS},
    )
    print(f"{options.out}: {manifest['rows']} rows of {manifest['dim']} dimensions")
    print(f"to load it: {plan_memory(manifest).text()}")
    return 0


class ProgressLine:
    """Progress on one line of a terminal; on anything else a line every 10 seconds, and the last."""

    def __init__(self, stream, clock=time.monotonic):
        self._stream, self._clock, self._next = stream, clock, float("-inf")

    def show(self, progress: Progress) -> None:
        last = progress.done == progress.total
        if self._stream.isatty():
            print(f"\r\x1b[K{progress.text()}", end="\n" if last else "", file=self._stream, flush=True)
        elif last or self._clock() >= self._next:
            self._next = self._clock() + LINE_SECONDS
            print(progress.text(), file=self._stream, flush=True)


def _set_faiss_threads(kind: str, threads: int) -> None:
    if kind == "exact":
        return
    try:
        import faiss
    except ImportError:
        return  # build_index says what to install
    faiss.omp_set_num_threads(threads)
