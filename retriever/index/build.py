"""Builds an index: check the corpus, encode it in shards, make the kind, describe it, move it into place."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from verl_credit_retriever.index.corpus import Documents, copy_corpus
from verl_credit_retriever.index.kinds import resolve
from verl_credit_retriever.index.manifest import DTYPES, KINDS, files_of, write_manifest
from verl_credit_retriever.index.memory import SEARCH_BUFFERS, gigabytes, plan_memory, require_memory
from verl_credit_retriever.index.place import check_out, lock, move_into_place, restore
from verl_credit_retriever.index.progress import Meter, Progress
from verl_credit_retriever.index.shards import Shards, may_take_up, size_of_shards, start_anew
from verl_credit_retriever.index.vectors import write_vectors

if TYPE_CHECKING:
    from verl_credit_retriever.encoder.encoder import SentenceEncoder

BATCHES_PER_CHUNK = 16  # texts of one chunk are sorted by length together
STAGE = "index"  # the folder in the work folder in which the index is put together
SHARD_ROWS = 20_000  # at most this much is encoded again after a kill


def build_index(
    corpus: str | Path,
    encoder: "str | Path | SentenceEncoder",
    out: str | Path,
    *,
    kind: str = "flat",
    dtype: str = "fp32",
    batch_size: int = 128,
    shard_rows: int = SHARD_ROWS,
    overwrite: bool = False,
    gpu: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
    **parameters: int | None,
) -> dict:
    """Index `corpus` (JSONL) with `encoder` (folder, or a loaded SentenceEncoder) in the folder `out`.

    Kinds: flat, sq8, ivf, hnsw (FAISS) and exact (none needed); `parameters` are those of `kinds.resolve`
    (nlist, nprobe, train_rows, m, ef_construction, ef_search, seed). `dtype` fp32 or fp16 is what vectors are
    stored in. The whole corpus is checked first, then encoded shard by shard in the folder
    `.<out>.building` beside `out`; a build that ended early is taken up there by the same command, and ends
    with the same bytes as one that did not. Another kind may take it up too: it needs the same vectors. At the
    end one rename makes `out`, which either does not exist or is complete. `overwrite` deletes nothing before
    corpus, parameters, memory and disk have been found right. Returns the manifest.

    Needs on disk: the corpus once, the vectors twice, thrice for ivf and hnsw.

    Errors: CorpusError names the line; FileExistsError when `out` exists, unless it is an index and
    `overwrite` is set; BuildRefused when another build of `out` runs, or an interrupted one has other settings
    or other lines and `overwrite` is not set; MemoryRefused; OSError when the disk is too full; ValueError for
    parameters.
    """
    corpus, out = Path(corpus), Path(out)
    _check_arguments(corpus, out, kind, dtype, batch_size, shard_rows, overwrite)
    faiss_kinds = _faiss(kind, DTYPES[dtype], gpu)
    if isinstance(encoder, str | Path):
        from verl_credit_retriever.encoder.encoder import SentenceEncoder

        encoder = SentenceEncoder(encoder, batch_size=batch_size)
    fingerprint = encoder.fingerprint()
    settings = {
        "encoder": {key: value for key, value in fingerprint.items() if key != "name"},
        "dtype": dtype,
        "shard_rows": shard_rows,
        "batch_size": batch_size,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    work = out.with_name(f".{out.name}.building")
    with lock(out):
        restore(out)
        check_out(out, overwrite)  # another build may have ended since
        take_up = may_take_up(work, settings, overwrite=overwrite)
        stage = work / STAGE
        try:
            shutil.rmtree(stage, ignore_errors=True)
            stage.mkdir(parents=True)
            _require_disk(work, corpus.stat().st_size, "the copy of the corpus")
            offsets = copy_corpus(corpus, stage / "corpus.jsonl")
            np.save(stage / "offsets.npy", offsets, allow_pickle=False)
            documents = Documents(stage / "corpus.jsonl", offsets)
            shape = {"rows": len(documents), "dim": encoder.dim, "dtype": DTYPES[dtype]}
            built_with, searched_with = resolve(kind, shape["rows"], parameters)
            # k-means keeps its sample twice: as it was read, and ordered. Later each row's list is kept.
            sample = (
                max(8 * shape["dim"] * built_with["train_rows"], 8 * shape["rows"]) if kind == "ivf" else 0
            )
            spec = {"kind": kind, "parameters": built_with, **shape}
            require_memory(
                spec,
                mmap=kind == "exact",
                also={"training": sample} if sample else None,
            )
            shards = Shards(work, documents, shard_rows=shard_rows, dim=shape["dim"], dtype=shape["dtype"])
            done = shards.find_done(overwrite=overwrite) if take_up else 0
            freed = 0 if take_up else size_of_shards(work)
            _require_disk(work, _vector_bytes(spec, done) - freed, "vectors and index")
            if not take_up:  # nothing that was encoded goes before all of the above was found right
                start_anew(work, settings, keep=stage)
            _encode(shards, encoder, batch_size * BATCHES_PER_CHUNK, done, on_progress)
            if faiss_kinds:
                index = faiss_kinds.create(
                    kind, shards.blocks, shards.take, **shape, parameters=built_with, gpu=gpu
                )
                faiss_kinds.write(index, stage / "index.faiss")
            if "vectors.npy" in files_of(kind):
                write_vectors(stage / "vectors.npy", shards.blocks(), **shape)
            manifest = write_manifest(
                stage,
                kind=kind,
                rows=shape["rows"],
                encoder=fingerprint,
                dtype=shape["dtype"],
                parameters=built_with,
                search=searched_with,
            )
            move_into_place(stage, out, files_of(kind))
        except BaseException:
            # What has been encoded is kept for the next try.
            if not list(work.glob("shard-*.json")):
                shutil.rmtree(work, ignore_errors=True)
            raise
        shutil.rmtree(work)
    return manifest


def _check_arguments(corpus, out, kind, dtype, batch_size, shard_rows, overwrite) -> None:
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}; accepted: {', '.join(KINDS)}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}; accepted: {', '.join(DTYPES)}")
    if batch_size < 1 or shard_rows < 1:
        raise ValueError(f"batch_size={batch_size}, shard_rows={shard_rows}: both need at least 1")
    check_out(out, overwrite)
    if not corpus.is_file():
        raise FileNotFoundError(f"corpus={str(corpus)!r} does not exist; expected a JSONL file")


def _faiss(kind: str, dtype: str, gpu: bool):
    """The module that builds `kind`; None for exact. Missing software is found before anything is encoded."""
    if kind == "exact":
        if gpu:
            raise ValueError("gpu: kind='exact' is built without FAISS; --device puts the encoder on a GPU")
        return None
    try:
        from verl_credit_retriever.index import faiss_kinds
    except ImportError as error:
        raise ValueError(f"kind={kind!r} needs FAISS ({error}); install faiss-cpu or use exact") from None
    if gpu:
        if kind != "ivf":
            raise ValueError(f"gpu: has no effect on building kind={kind!r}; it speeds up ivf")
        faiss_kinds.require_gpu(kind, dtype)
    return faiss_kinds


def _encode(shards: Shards, encoder, chunk_rows: int, done: int, report) -> None:
    meter = Meter(shards.rows, done, report)
    meter.at(done)

    def on_rows(rows: int) -> None:
        nonlocal done
        done += rows
        meter.at(done)

    shards.encode_missing(encoder.encode_passages, chunk_rows, on_rows)


def _vector_bytes(spec: dict, done: int) -> int:
    """What encoding and building will write: shards, vectors.npy and index.faiss, whichever the kind has."""
    row_bytes = spec["dim"] * np.dtype(spec["dtype"]).itemsize
    shards, files = (spec["rows"] - done) * row_bytes, files_of(spec["kind"])
    vectors = spec["rows"] * row_bytes if "vectors.npy" in files else 0
    return shards + vectors + (plan_memory(spec).total - SEARCH_BUFFERS if "index.faiss" in files else 0)


def _require_disk(folder: Path, needed: int, what: str) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(f"{folder}: {what} take {gigabytes(needed)}; the disk has {gigabytes(free)} free")
