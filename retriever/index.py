"""A FAISS inner-product index over a JSONL corpus, with its documents beside it."""

import os
import shutil
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import faiss
import numpy as np

from .corpus import Documents, read_corpus
from .encoder import SentenceEncoder
from .manifest import FILES, IndexMismatch, check_encoder, check_files, read_manifest, write_manifest

KINDS = ("flat",)
BATCHES_PER_CHUNK = 16  # texts of one chunk are sorted by length together


def build_index(
    corpus: str | Path,
    encoder: str | Path | SentenceEncoder,
    out: str | Path,
    *,
    kind: str = "flat",
    batch_size: int = 128,
    overwrite: bool = False,
    on_progress: Callable[[int], None] | None = None,
) -> dict:
    """Index `corpus` (JSONL) with `encoder` (folder, or a loaded SentenceEncoder) in the folder `out`.

    The corpus is streamed. Everything is written to a temporary folder beside `out`, which is renamed at the
    end: `out` either does not exist or is complete. Returns the manifest; `on_progress(rows so far)`.
    Errors: CorpusError names the line; FileExistsError when `out` exists, unless it is an index and
    `overwrite` is set.
    """
    corpus, out = Path(corpus), Path(out)
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}; accepted: {', '.join(KINDS)}")
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}; at least 1")
    if out.exists() and not (overwrite and (out / "manifest.json").is_file()):
        hint = "pass overwrite to replace it" if (out / "manifest.json").is_file() else "it is not an index"
        raise FileExistsError(f"out={str(out)!r} exists: {hint}")
    if not corpus.is_file():
        raise FileNotFoundError(f"corpus={str(corpus)!r} does not exist; expected a JSONL file")
    if not isinstance(encoder, SentenceEncoder):
        encoder = SentenceEncoder(encoder, batch_size=batch_size)
    out.parent.mkdir(parents=True, exist_ok=True)
    work = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    old = work.with_suffix(".old")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        rows = _write_files(corpus, encoder, work, batch_size * BATCHES_PER_CHUNK, on_progress)
        manifest = write_manifest(work, kind=kind, rows=rows, encoder=encoder.fingerprint())
        _flush_to_disk(work)
        if out.exists():
            os.rename(out, old)
        os.rename(work, out)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return manifest


class SearchIndex:
    """A loaded index. `search` may be called from several threads at once."""

    def __init__(self, faiss_index, documents: Documents, manifest: dict):
        self._faiss, self.documents, self.manifest = faiss_index, documents, manifest

    def __len__(self) -> int:
        return len(self.documents)

    @classmethod
    def load(cls, folder: str | Path, *, verify: bool = True) -> "SearchIndex":
        """Load an index after comparing its files with its manifest.

        `verify=False` skips the hashes (they read every byte once), never the row and dimension counts.
        Errors: IndexMismatch names the file, its value and the right one.
        """
        folder = Path(folder)
        manifest = read_manifest(folder)
        if verify:
            check_files(folder, manifest)
        index = faiss.read_index(str(folder / "index.faiss"))
        offsets = np.load(folder / "offsets.npy", mmap_mode="r", allow_pickle=False)
        found = {
            "index.faiss: rows": (index.ntotal, manifest["rows"]),
            "index.faiss: dim": (index.d, manifest["dim"]),
            "index.faiss: metric": (index.metric_type, faiss.METRIC_INNER_PRODUCT),
            "offsets.npy: rows": (len(offsets) - 1, manifest["rows"]),
            "corpus.jsonl: bytes": ((folder / "corpus.jsonl").stat().st_size, int(offsets[-1])),
        }
        for what, (value, right) in found.items():
            if value != right:
                raise IndexMismatch(f"{folder}/{what}={value}; expected {right}; rebuild the index")
        return cls(index, Documents(folder / "corpus.jsonl", offsets), manifest)

    def check_encoder(self, encoder: SentenceEncoder) -> None:
        """Refuse an encoder other than the one that built the index. Errors: IndexMismatch."""
        check_encoder(self.manifest, encoder.fingerprint())

    def search(self, vectors_N_D: np.ndarray, k: int) -> list[list[tuple[dict, float]]]:
        """The k documents of largest inner product per vector, best first: N lists of (document, score).

        k above the number of rows returns all rows: a list never holds a missing hit. Errors: ValueError for
        k < 1, a wrong shape or vectors that are not finite; IndexMismatch if FAISS returns an impossible hit.
        """
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ValueError(f"k={k!r}; expected an integer of at least 1")
        vectors_N_D = np.ascontiguousarray(vectors_N_D, dtype=np.float32)
        if vectors_N_D.ndim != 2 or vectors_N_D.shape[1] != self._faiss.d:
            raise ValueError(f"vectors of shape {vectors_N_D.shape}; expected [N, {self._faiss.d}]")
        if not np.isfinite(vectors_N_D).all():
            raise ValueError("vectors hold NaN or infinity")
        if not len(vectors_N_D):
            return []
        scores_N_K, rows_N_K = self._faiss.search(vectors_N_D, min(k, len(self)))
        if not np.isfinite(scores_N_K).all() or rows_N_K.min() < 0 or rows_N_K.max() >= len(self):
            raise IndexMismatch(
                "FAISS returned a hit without a document or score; the index is damaged, rebuild it"
            )
        return [
            [(self.documents[row], score) for row, score in zip(rows, scores, strict=True)]
            for rows, scores in zip(rows_N_K.tolist(), scores_N_K.tolist(), strict=True)
        ]


def _write_files(corpus: Path, encoder: SentenceEncoder, work: Path, chunk_rows: int, on_progress) -> int:
    index, ends = faiss.IndexFlatIP(encoder.dim), [0]
    with open(work / "corpus.jsonl", "wb") as copy:
        for chunk in _chunks(read_corpus(corpus), chunk_rows):
            for line, _ in chunk:
                copy.write(line)
                ends.append(ends[-1] + len(line))
            index.add(encoder.encode_passages([document["contents"] for _, document in chunk]))
            if on_progress:
                on_progress(index.ntotal)
    faiss.write_index(index, str(work / "index.faiss"))
    np.save(work / "offsets.npy", np.asarray(ends, dtype=np.int64), allow_pickle=False)
    return index.ntotal


def _chunks(rows: Iterator, size: int) -> Iterator[list]:
    while chunk := list(islice(rows, size)):
        yield chunk


def _flush_to_disk(folder: Path) -> None:
    # Without this a power cut after the rename could leave a complete-looking folder of empty files.
    for name in (*FILES, "manifest.json"):
        with open(folder / name, "rb") as handle:
            os.fsync(handle.fileno())
