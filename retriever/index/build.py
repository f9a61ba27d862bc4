"""Builds an index: check the corpus, encode it in shards, make the kind, describe it, move it into place."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from verl_credit_retriever.index.corpus import take_corpus
from verl_credit_retriever.index.encoding import encode_missing
from verl_credit_retriever.index.exact import write_array
from verl_credit_retriever.index.kinds import need_faiss, resolve
from verl_credit_retriever.index.manifest import DTYPES, files_of, write_manifest
from verl_credit_retriever.index.memory import SEARCH_BUFFERS, plan_memory, require_disk, require_memory
from verl_credit_retriever.index.place import check_out, lock, move_into_place, restore
from verl_credit_retriever.index.shards import Shards, can_resume, start_over

if TYPE_CHECKING:
    from verl_credit_retriever.encoder import SentenceEncoder

STAGE = "index"  # the folder in the work folder in which the index is put together
SHARD_ROWS = 20_000  # a killed build loses at most this many encoded rows


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
    devices: Sequence[str] = (),
    on_progress: Callable[[int, int], None] | None = None,
    **parameters: int | None,
) -> dict:
    """Index `corpus` (JSONL) with `encoder` (folder, or a loaded SentenceEncoder) in the folder `out`.

    Kinds: flat, sq8, ivf, ivfpq, hnsw (FAISS) and exact (no FAISS); `parameters` are those of `kinds.resolve`. The whole
    corpus is checked first, then encoded shard by shard in the folder `.<out>.building` beside `out`. The same command
    resumes an interrupted build there and writes the same bytes; another kind may, too, because it needs the same vectors.
    Several torch `devices` each get a process with the encoder; the caller's module must be importable then. One rename at
    the end creates `out`. `overwrite` deletes nothing until all checks have passed. Returns the manifest.

    Disk: the corpus once, the vectors twice, thrice for ivf and hnsw.

    Errors: CorpusError names the line; FileExistsError when `out` exists and is no index, or without `overwrite`;
    BuildRefused when another build of `out` runs, or without `overwrite` an interrupted one has other settings or lines;
    MemoryRefused; OSError when the disk is too full; ValueError for parameters.
    """
    corpus, out, faiss_kinds = Path(corpus), Path(out), None
    if kind != "exact":  # missing software is reported before anything is encoded
        faiss_kinds = need_faiss(f"kind={kind!r}", " or use exact")
    if batch_size < 1 or shard_rows < 1:
        raise ValueError(f"batch_size={batch_size}, shard_rows={shard_rows}: both need at least 1")
    check_out(out, overwrite)
    require_corpus(corpus)
    if isinstance(encoder, str | Path):
        from verl_credit_retriever.encoder import SentenceEncoder

        encoder = SentenceEncoder(encoder, batch_size=batch_size)
    # The bits of the vectors depend on these.
    settings = {"encoder": {key: value for key, value in encoder.fingerprint().items() if key != "name"}}
    settings |= {"dtype": dtype, "shard_rows": shard_rows, "batch_size": batch_size}
    settings["encode_dtype"] = encoder.dtype
    out.parent.mkdir(parents=True, exist_ok=True)
    work = out.with_name(f".{out.name}.building")
    with lock(out):
        restore(out)
        check_out(out, overwrite)  # another build may have ended since
        resume = can_resume(work, settings, overwrite=overwrite)
        stage = work / STAGE
        try:
            documents = take_corpus(corpus, stage)
            shape = {"rows": len(documents), "dim": encoder.dim, "dtype": DTYPES[dtype]}
            built_with, searched_with = resolve(kind, shape["rows"], shape["dim"], parameters)
            # k-means holds its sample twice, as read and ordered, ivfpq thrice; later each row's list is held.
            sample = (12 if kind == "ivfpq" else 8) * shape["dim"] * built_with.get("train_rows", 0)
            also = {"training": max(sample, 8 * shape["rows"])} if sample else None
            spec = {"kind": kind, "parameters": built_with, **shape}
            require_memory(spec, mmap=kind == "exact", also=also)
            shards = Shards(work, documents, shard_rows, encoder.dim, DTYPES[dtype])
            done = shards.find_done(overwrite=overwrite) if resume else 0
            # Shards, vectors.npy and index.faiss are written, as the kind has them, and shards of another build deleted.
            files, freed = files_of(kind), sum(path.stat().st_size for path in work.glob("shard-*.vectors"))
            bytes_of = {"vectors.npy": shards.rows * shards.row_bytes}
            bytes_of["index.faiss"] = plan_memory(spec).total - SEARCH_BUFFERS
            needed = (shards.rows - done) * shards.row_bytes + sum(bytes_of.get(name, 0) for name in files)
            require_disk(work, needed - (0 if resume else freed), "vectors and index")
            if not resume:  # only now: encoded vectors are kept until every check has passed
                start_over(work, settings, keep=stage)
            encode_missing(shards, encoder, batch_size, done=done, report=on_progress, devices=devices)
            if faiss_kinds:
                index = faiss_kinds.create(kind, shards.blocks, shards.take, **shape, parameters=built_with)
                faiss_kinds.write(index, stage / "index.faiss")
            if "vectors.npy" in files:
                size = shape["rows"], shape["dim"]
                write_array(stage / "vectors.npy", shards.blocks(), size, shape["dtype"])
            made_with = {
                "encoder": encoder.fingerprint(),
                "encoded_in": encoder.dtype,
                "dtype": shape["dtype"],
            }
            made_with |= {"parameters": built_with, "search": searched_with}
            manifest = write_manifest(stage, kind=kind, rows=shape["rows"], **made_with)
            move_into_place(stage, out, files)
        except BaseException:
            # Encoded vectors are kept for the next try.
            if not list(work.glob("shard-*.json")):
                shutil.rmtree(work, ignore_errors=True)
            raise
        shutil.rmtree(work)
    return manifest


def require_corpus(corpus: Path) -> None:
    if not corpus.is_file():
        raise FileNotFoundError(f"corpus={str(corpus)!r} does not exist; expected a JSONL file")
