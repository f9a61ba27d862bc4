"""The output folder: written completely or not at all, and never over files of others."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl_credit.worlds.data.records import PrepareError

OURS = {"train.parquet", "val.parquet", "test.parquet", "corpus.jsonl", "report.json", "manifest.json"}


def check_free(out: Path, overwrite: bool) -> None:
    """Raises PrepareError when writing to ``out`` would delete files."""
    if not out.exists():
        return
    if not out.is_dir():
        raise PrepareError(f"--out={out} is a file; expected a folder that is new or empty")
    there = sorted(path.name for path in out.iterdir())
    foreign = [name for name in there if name not in OURS]
    if foreign and overwrite:
        raise PrepareError(
            f"--out={out} holds {', '.join(foreign[:3])}, not written by prepare: move it away"
        )
    if there and not overwrite:
        raise PrepareError(f"--out={out} holds {', '.join(there[:3])}: give another folder, or --overwrite")


@contextmanager
def staged(out: Path, overwrite: bool) -> Iterator[Path]:
    """A new folder beside ``out``; it is renamed to ``out`` when the block succeeds, and removed otherwise."""
    out = out.expanduser().resolve()
    check_free(out, overwrite)
    out.parent.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        new, old = stage / "new", stage / "old"
        new.mkdir()
        yield new
        check_free(out, overwrite)
        if out.exists():
            out.rename(old)
        try:
            new.rename(out)
        except OSError:
            if old.exists():
                old.rename(out)
            raise
    finally:
        shutil.rmtree(stage, ignore_errors=True)
