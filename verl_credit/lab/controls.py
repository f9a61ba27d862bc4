"""Control experiments: the same index with the articles' contents swapped at random."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np

from verl_credit_retriever.index.manifest import write_manifest
from verl_credit_retriever.index.search import SearchIndex


def swap_contents(index: Path, out: Path, seed: int = 0) -> Path:
    """A copy of ``index`` in which every article keeps its title, id and vector but has another one's text.

    What is found for a query stays the same; what is read there is about something else. A policy that
    learns by reading cannot improve on it, one that exploits anything else can. No article keeps its text
    (the permutation is one cycle).

    Raises IndexMismatch when ``index`` is damaged, FileExistsError when ``out`` exists.
    """
    index, out = Path(index), Path(out)
    source = SearchIndex.load(index)
    documents = [source.documents[row] for row in range(len(source))]
    pages = [document["contents"].partition("\n") for document in documents]
    order = list(range(len(documents)))
    random.Random(f"swap {seed}").shuffle(order)
    text_of = {row: pages[other][2] for row, other in zip(order, order[1:] + order[:1], strict=True)}
    out.mkdir(parents=True)
    ends = [0]
    with open(out / "corpus.jsonl", "wb") as lines:
        for row, document in enumerate(documents):
            swapped = {"id": document["id"], "contents": f"{pages[row][0]}\n{text_of[row]}"}
            ends.append(ends[-1] + lines.write((json.dumps(swapped) + "\n").encode()))
    np.save(out / "offsets.npy", np.asarray(ends, dtype=np.int64), allow_pickle=False)
    shutil.copy(index / "index.faiss", out / "index.faiss")
    encoder = source.manifest["encoder"]
    write_manifest(out, kind=source.manifest["kind"], rows=len(documents), encoder=encoder)
    return out
