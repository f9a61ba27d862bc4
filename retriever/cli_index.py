"""`verl-credit-retriever index`: its options, and the line that shows how far it is."""

import sys
from collections.abc import Callable
from dataclasses import make_dataclass
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from verl_credit_retriever.index.manifest import DTYPES, KINDS
from verl_credit_retriever.settings import POOLINGS, Threads, number, takes

PARAMETERS = {
    "nlist": "ivf, ivfpq: number of lists (default: 4·√rows, at most rows / 39)",
    "train_rows": "ivf, ivfpq: rows that lists and codes are learnt from (default: 64 of each)",
    "nprobe": "ivf, ivfpq: lists read per query (default: √lists, at least 8)",
    "pq_bytes": "ivfpq: bytes of a row (default: dimensions / 4, or the divisor below)",
    "refine": "ivfpq: candidates per document whose own vectors are compared (default: 16)",
    "m": "hnsw: links per row and level (default: 32)",
    "ef_construction": "hnsw: candidates while building (default: 200)",
    "ef_search": "hnsw: candidates per query (default: 128)",
    "seed": "ivf, ivfpq, hnsw: of sampling, k-means and levels (default: 0)",
}
Parameters = make_dataclass(
    "Parameters", [(name, Annotated[int | None, number(text)], None) for name, text in PARAMETERS.items()]
)


@takes(Parameters)
def index(
    corpus: Annotated[Path, Option(help='JSONL of {"id", "contents"}')],
    encoder: Annotated[Path, Option(help="Hugging Face encoder folder")],
    out: Annotated[Path, Option(help="folder to create")],
    import_: Annotated[
        Path | None,
        Option("--import", help="a flat FAISS index of this corpus and encoder, taken over without encoding"),
    ] = None,
    kind: Annotated[Literal[KINDS], Option(help="exact needs no FAISS")] = "flat",
    dtype: Annotated[Literal[tuple(DTYPES)], Option(help="of the stored vectors")] = "fp32",
    batch_size: Annotated[int, number("texts per call of the encoder")] = 128,
    shard_rows: Annotated[int, number("rows encoded between two savings")] = 20_000,
    max_length: Annotated[int, number("tokens kept of a text")] = 256,
    query_prefix: str = "query: ",
    passage_prefix: str = "passage: ",
    pooling: Annotated[
        Literal[POOLINGS] | None,
        Option(help="default: what sentence-transformers' files in the encoder's folder say, else mean (e5)"),
    ] = None,
    no_normalize: Annotated[bool, Option("--no-normalize", help="keep the vectors' lengths")] = False,
    overwrite: Annotated[bool, Option("--overwrite", help="replace an index or interrupted build")] = False,
    device: Annotated[str, Option(help="torch device of the encoder, or several with commas")] = "cpu",
    encode_dtype: Annotated[
        Literal["fp32", "bf16", "fp16"], Option(help="in which the encoder computes; bf16 or fp16 on GPUs")
    ] = "fp32",
    threads: Threads = None,
    **parameters: int | None,
):
    import torch
    import transformers

    from verl_credit_retriever.encoder import SentenceEncoder, device_for
    from verl_credit_retriever.index.build import build_index
    from verl_credit_retriever.index.importing import import_index
    from verl_credit_retriever.index.kinds import need_faiss, resolve
    from verl_credit_retriever.index.memory import plan_memory

    devices = [name.strip() for name in device.split(",")]
    for name in devices if len(devices) > 1 else ():  # a single one is checked where it is used
        device_for(name, encode_dtype)
    if import_ is not None and len(devices) > 1:
        raise ValueError(f"--device={device}: --import={import_} encodes a few rows, on one device; give one")
    if threads is not None:
        torch.set_num_threads(threads)
        if kind != "exact":
            need_faiss(f"kind={kind!r}", " or use exact").faiss.omp_set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    if device == "cpu" and torch.cuda.is_available():
        print("encoding on the CPU although torch sees a GPU: --device cuda uses it", file=sys.stderr)
    conventions = {"query_prefix": query_prefix, "passage_prefix": passage_prefix, "max_length": max_length}
    conventions |= {"pooling": pooling, "normalize": not no_normalize}
    here = devices[0] if len(devices) == 1 else "cpu"  # each process loads its own
    loaded = SentenceEncoder(encoder, **conventions, device=here, batch_size=batch_size, dtype=encode_dtype)
    if import_ is not None:
        if (kind, dtype) != ("flat", "fp32"):
            raise ValueError(f"--import={import_}: keeps the kind of the file; leave out --kind and --dtype")
        resolve("flat", 1, 1, parameters)  # refuses what flat does not use
        manifest = import_index(import_, corpus, loaded, out, overwrite=overwrite)
    else:
        build = {"kind": kind, "dtype": dtype, "batch_size": batch_size, "shard_rows": shard_rows}
        build |= {"overwrite": overwrite, "devices": devices, "on_progress": _progress_bar()}
        manifest = build_index(corpus, loaded, out, **build, **parameters)
    print(f"{out}: {manifest['rows']} rows of {manifest['dim']} dimensions")
    print(f"to load it: {plan_memory(manifest).text()}")
    return 0


def _progress_bar() -> Callable:
    """Shows the progress on one line, which in a file is written every 10 seconds."""
    from tqdm import tqdm

    bar = None

    def show(done: int, total: int) -> None:
        nonlocal bar
        if bar is None:  # what an interrupted build left is not in the rate
            every = 0.1 if sys.stderr.isatty() else 10.0
            bar = tqdm(total=total, initial=done, unit=" rows", mininterval=every, miniters=1)
        bar.update(done - bar.n)
        if done == total:
            bar.close()

    return show
