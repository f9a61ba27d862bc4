"""Takes over vectors that another program computed for the same corpus, such as Search-R1's e5_Flat.index.

A flat index of float32 or float16 vectors is taken as it is.
"""

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from verl_credit_retriever.index.build import require_corpus
from verl_credit_retriever.index.corpus import take_corpus
from verl_credit_retriever.index.exact import open_vectors
from verl_credit_retriever.index.kinds import need_faiss
from verl_credit_retriever.index.manifest import IndexMismatch, files_of, write_manifest
from verl_credit_retriever.index.memory import require_disk
from verl_credit_retriever.index.place import check_out, import_stage, lock, move_into_place, restore

if TYPE_CHECKING:
    from verl_credit_retriever.encoder import SentenceEncoder

ALIKE = 0.99
"""Least cosine between a stored vector and the same row encoded here: half precision leaves .9999, another row far less."""
LENGTH_OFF = 0.02
SAMPLE = 64
BLOCK = 1 << 16


def import_index(
    source: str | Path,
    corpus: str | Path,
    encoder: "SentenceEncoder",
    out: str | Path,
    *,
    overwrite: bool = False,
) -> dict:
    """Make `out` from the index `source`, whose row r is line r of `corpus`. Returns the manifest.

    Its dtype is that of the file. The first, the last and SAMPLE seeded rows are encoded and compared with the stored
    vectors; the others are taken on trust, but for NaN and infinity. The file is linked where it can be, else copied.
    One rename at the end creates `out`, as in `build_index`.

    Errors: IndexMismatch for another type, number of rows, dimension or metric, and for a sampled row whose vector is
    another; CorpusError, FileExistsError, BuildRefused and OSError as `build_index`; ValueError without FAISS.
    """
    source, corpus, out = Path(source), Path(corpus), Path(out)
    if not source.is_file():
        raise FileNotFoundError(f"import={str(source)!r} does not exist; expected a FAISS index file")
    require_corpus(corpus)
    check_out(out, overwrite)
    faiss_kinds = need_faiss("import", "")
    properties = faiss_kinds.read_foreign(source, encoder.dim)
    rows, dtype = properties["rows"], properties["dtype"]
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
            _compare(source, corpus, open_vectors(stage, properties), documents, encoder)
            manifest = write_manifest(
                stage, kind="flat", rows=rows, encoder=encoder.fingerprint(), dtype=dtype
            )
            move_into_place(stage, out, files_of("flat"))
        finally:
            shutil.rmtree(stage, ignore_errors=True)
    return manifest


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
    except OSError:  # another file system, or one without links
        require_disk(target.parent, source.stat().st_size, "the copy of the index")
        shutil.copyfile(source, target)


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
    # FAISS would answer from rows that hold NaN as if nothing were wrong.
    for first in range(0, rows, BLOCK):
        bad = np.flatnonzero(~np.isfinite(stored_M_D[first : first + BLOCK]).all(axis=1))
        if bad.size:
            raise IndexMismatch(f"{source}: row {first + bad[0]} holds NaN or infinity")
