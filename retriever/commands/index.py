"""`verl-credit-retriever index`: its options, and the line that shows how far it is."""

import sys
import time
from pathlib import Path
from typing import Literal

from typer import Option

from verl_credit_retriever.commands import THREADS
from verl_credit_retriever.encoder_settings import POOLINGS
from verl_credit_retriever.index.manifest import DTYPES, KINDS

LINE_SECONDS = 10.0  # between progress lines where the line cannot be rewritten in place


def index(
    corpus: Path = Option(help='JSONL of {"id", "contents"}'),
    encoder: Path = Option(help="Hugging Face encoder folder"),
    out: Path = Option(help="folder to create"),
    import_: Path | None = Option(
        None, "--import", help="a flat FAISS index of this corpus and encoder, taken over without encoding"
    ),
    kind: Literal[KINDS] = Option("flat", help="exact needs no FAISS"),
    dtype: Literal[tuple(DTYPES)] = Option("fp32", help="of the stored vectors"),
    nlist: int | None = Option(
        None, parser=int, help="ivf, ivfpq: number of lists (default: 4·√rows, at most rows / 39)"
    ),
    train_rows: int | None = Option(
        None, parser=int, help="ivf, ivfpq: rows that lists and codes are learnt from (default: 64 of each)"
    ),
    nprobe: int | None = Option(
        None, parser=int, help="ivf, ivfpq: lists read per query (default: √lists, at least 8)"
    ),
    pq_bytes: int | None = Option(
        None, parser=int, help="ivfpq: bytes of a row (default: dimensions / 4, or the divisor below)"
    ),
    refine: int | None = Option(
        None, parser=int, help="ivfpq: candidates per document whose own vectors are compared (default: 16)"
    ),
    m: int | None = Option(None, parser=int, help="hnsw: links per row and level (default: 32)"),
    ef_construction: int | None = Option(
        None, parser=int, help="hnsw: candidates while building (default: 200)"
    ),
    ef_search: int | None = Option(None, parser=int, help="hnsw: candidates per query (default: 128)"),
    seed: int | None = Option(
        None, parser=int, help="ivf, ivfpq, hnsw: of sampling, k-means and levels (default: 0)"
    ),
    gpu: bool = Option(False, "--gpu", help="learn ivf's lists on a GPU; needs faiss-gpu-cu12"),
    batch_size: int = Option(128, parser=int, help="texts per call of the encoder"),
    shard_rows: int = Option(20_000, parser=int, help="rows encoded between two savings"),
    max_length: int = Option(256, parser=int, help="tokens kept of a text"),
    query_prefix: str = "query: ",
    passage_prefix: str = "passage: ",
    pooling: Literal[POOLINGS] | None = Option(
        None, help="default: what sentence-transformers' files in the encoder's folder say, else mean (e5)"
    ),
    no_normalize: bool = Option(False, "--no-normalize", help="keep the vectors' lengths"),
    overwrite: bool = Option(False, "--overwrite", help="replace an index or an interrupted build"),
    shard: str | None = Option(
        None, help="i/n: encode every n-th shard only, on one of n machines; --merge makes the index"
    ),
    merge: bool = Option(False, "--merge", help="make the index of shards that are all there; encodes none"),
    device: str = Option("cpu", help="torch device of the encoder; several with commas have a process each"),
    encode_dtype: Literal["fp32", "bf16", "fp16"] = Option(
        "fp32", help="in which the encoder computes; bf16 or fp16 on GPUs"
    ),
    threads: int | None = THREADS,
):
    import torch
    import transformers

    from verl_credit_retriever.encoder import SentenceEncoder, device_for
    from verl_credit_retriever.index.build import build_index, encode_share
    from verl_credit_retriever.index.memory import plan_memory

    share = None if shard is None else _share(shard)
    if [import_ is not None, share is not None, merge].count(True) > 1:
        raise ValueError("--import, --shard and --merge: give one of them")
    if share is not None and gpu:
        raise ValueError(
            f"--gpu: has no effect with --shard={shard}, which makes no index; give it with --merge"
        )
    devices = [name.strip() for name in device.split(",")]
    for name in devices[1:] and devices:  # a single one is looked at where it is used
        device_for(name, encode_dtype)
    if import_ is not None and len(devices) > 1:
        raise ValueError(f"--device={device}: --import={import_} encodes a few rows, on one device; give one")
    if threads is not None:
        torch.set_num_threads(threads)
        _set_faiss_threads(kind, threads)
    transformers.utils.logging.disable_progress_bar()
    if device == "cpu" and torch.cuda.is_available():
        print("encoding on the CPU although torch sees a GPU: --device cuda uses it", file=sys.stderr)
    loaded = SentenceEncoder(
        encoder,
        query_prefix=query_prefix,
        passage_prefix=passage_prefix,
        max_length=max_length,
        pooling=pooling,
        normalize=not no_normalize,
        device=devices[0] if len(devices) == 1 else "cpu",  # each process loads its own
        batch_size=batch_size,
        dtype=encode_dtype,
    )
    parameters = {
        "nlist": nlist,
        "train_rows": train_rows,
        "nprobe": nprobe,
        "pq_bytes": pq_bytes,
        "refine": refine,
        "m": m,
        "ef_construction": ef_construction,
        "ef_search": ef_search,
        "seed": seed,
    }
    for note in loaded.notes:
        print(f"note: {note}", file=sys.stderr)
    if import_ is not None:
        if (kind, dtype, gpu) != ("flat", "fp32", False):
            raise ValueError(
                f"--import={import_}: gives kind flat in fp32; leave out --kind, --dtype and --gpu"
            )
        from verl_credit_retriever.index.imported import import_index
        from verl_credit_retriever.index.kinds import resolve

        resolve("flat", 1, 1, parameters)  # refuses what flat does not use
        manifest = import_index(import_, corpus, loaded, out, overwrite=overwrite)
        return print(_made(out, manifest, plan_memory(manifest)))
    options = {
        "kind": kind,
        "dtype": dtype,
        "batch_size": batch_size,
        "shard_rows": shard_rows,
        "overwrite": overwrite,
        "devices": devices,
        "on_progress": ProgressLine(sys.stderr).show,
        **parameters,
    }
    if share is not None:
        shards = encode_share(corpus, loaded, out, share, **options)
        if not shards.rows:
            return print(
                f"shard {shard}: nothing to encode here, because the corpus has only {shards.count} of {shard_rows:,} rows "
                "(a smaller --shard-rows on all machines makes more)"
            )
        return print(
            f"{shards.work}: {shards.rows:,} of {shards.all_rows:,} rows are encoded here (shard {shard}); with all "
            "shards in this folder, --merge instead of --shard makes the index"
        )
    manifest = build_index(corpus, loaded, out, gpu=gpu, merge=merge, **options)
    print(_made(out, manifest, plan_memory(manifest)))


def _share(text: str) -> tuple[int, int]:
    try:
        part, parts = map(int, text.split("/"))
    except ValueError:
        raise ValueError(f"--shard={text!r}; expected i/n, such as 1/4") from None
    return part, parts


def _made(out: Path, manifest: dict, memory) -> str:
    return f"{out}: {manifest['rows']} rows of {manifest['dim']} dimensions\nto load it: {memory.text()}"


class ProgressLine:
    """Progress on one line of a terminal; on anything else a line every 10 seconds, and the last."""

    def __init__(self, stream, clock=time.monotonic):
        self._stream, self._clock, self._next = stream, clock, float("-inf")

    def show(self, progress) -> None:
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
