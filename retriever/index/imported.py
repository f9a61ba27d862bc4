"""Takes over a FAISS index that another program built over the same corpus, such as Search-R1's e5_Flat.index."""

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from verl_credit_retriever.index.build import require_corpus, require_disk, take_corpus
from verl_credit_retriever.index.exact import open_vectors
from verl_credit_retriever.index.kinds import need_faiss
from verl_credit_retriever.index.manifest import IndexMismatch, files_of, write_manifest
from verl_credit_retriever.index.place import check_out, import_stage, lock, move_into_place, restore

if TYPE_CHECKING:
    from verl_credit_retriever.encoder import SentenceEncoder

ALIKE = 0.99
"""Least cosine between a stored vector and the same row encoded here: half precision leaves .9999, another row far less."""
LENGTH_OFF = 0.02
SAMPLE = 64


def import_index(
    source: str | Path,
    corpus: str | Path,
    encoder: "SentenceEncoder",
    out: str | Path,
    *,
    overwrite: bool = False,
) -> dict:
    """Make `out` from the flat float32 index `source`, whose row r is line r of `corpus`. Returns the manifest.

    The first, the last and SAMPLE seeded rows are encoded and compared with the stored vectors; the others are taken
    on trust, but for NaN and infinity. The file is linked where it can be, else copied. One rename at the end creates
    `out`, as in `build_index`.

    Errors: IndexMismatch for another type, number of rows, dimension or metric, and for a sampled row whose vector is
    another; CorpusError, FileExistsError, BuildRefused and OSError as `build_index`; ValueError without FAISS.
    """
    source, corpus, out = Path(source), Path(corpus), Path(out)
    if not source.is_file():
        raise FileNotFoundError(f"import={str(source)!r} does not exist; expected a FAISS index file")
    require_corpus(corpus)
    check_out(out, overwrite)
    rows = _rows_of(source, encoder.dim)
    out.parent.mkdir(parents=True, exist_ok=True)
    with lock(out):
        restore(out)
        check_out(out, overwrite)
        stage = import_stage(out)
        try:
            documents = take_corpus(corpus, stage)
            if len(documents) != rows:
                raise IndexMismatch(f"{source}: {rows} rows; {corpus} has {len(documents)}")
            _link_or_copy(source, stage / "index.faiss")
            stored_M_D = open_vectors(
                stage, {"kind": "flat", "rows": rows, "dim": encoder.dim, "dtype": "float32"}
            )
            _compare(source, corpus, stored_M_D, documents, encoder)
            _require_finite(source, stored_M_D)
            manifest = write_manifest(stage, kind="flat", rows=rows, encoder=encoder.fingerprint())
            move_into_place(stage, out, files_of("flat"))
        finally:
            shutil.rmtree(stage, ignore_errors=True)
    return manifest


def _rows_of(source: Path, dim: int) -> int:
    """The rows of a flat index by inner product of this dimension; its vectors stay in the file."""
    faiss = need_faiss("import", "").faiss
    try:
        index = faiss.read_index(str(source), faiss.IO_FLAG_MMAP_IFC)
    except (RuntimeError, MemoryError) as error:
        raise IndexMismatch(
            f"{source}: FAISS cannot read it ({str(error).strip().splitlines()[-1]})"
        ) from None
    if not isinstance(index, faiss.IndexFlat):
        raise IndexMismatch(
            f"{source}: {type(index).__name__}; a flat index of float32 vectors is taken over, no other"
        )
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise IndexMismatch(
            f"{source}: metric {index.metric_type}; expected the inner product ({faiss.METRIC_INNER_PRODUCT})"
        )
    if index.d != dim:
        raise IndexMismatch(f"{source}: {index.d} dimensions; the encoder has {dim}")
    return index.ntotal


def _compare(source, corpus, stored_M_D, documents, encoder) -> None:
    rows = len(documents)
    drawn = np.random.default_rng(0).choice(rows, min(SAMPLE, rows), replace=False)
    places = sorted({0, rows - 1, *drawn.tolist()})
    own_N_D = encoder.encode_passages([documents[row]["contents"] for row in places])
    for row, own_D in zip(places, own_N_D, strict=True):
        stored_D = np.asarray(stored_M_D[row], dtype=np.float32)
        length, own_length = np.linalg.norm(stored_D), np.linalg.norm(own_D)
        cosine = float(stored_D @ own_D / max(length * own_length, 1e-12))
        if not cosine >= ALIKE:
            raise IndexMismatch(
                f"{source}: row {row} is not {corpus}:{row + 1} as this encoder sees it (cosine {cosine:.3f}, expected at "
                f"least {ALIKE}): another encoder, prefix, pooling, length or order of lines"
            )
        if not abs(length / own_length - 1) <= LENGTH_OFF:
            raise IndexMismatch(
                f"{source}: row {row} has length {length:.3f}; this encoder gives {own_length:.3f}: see --no-normalize"
            )


def _require_finite(source: Path, stored_M_D: np.ndarray, block: int = 1 << 16) -> None:
    """FAISS would answer from rows that hold NaN as if nothing were wrong."""
    for first in range(0, len(stored_M_D), block):
        bad = np.flatnonzero(~np.isfinite(stored_M_D[first : first + block]).all(axis=1))
        if bad.size:
            raise IndexMismatch(f"{source}: row {first + bad[0]} holds NaN or infinity")


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
    except OSError:  # another file system, or one without links
        require_disk(target.parent, source.stat().st_size, "the copy of the index")
        shutil.copyfile(source, target)
