"""Where the files of a lab are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class LabPaths:
    """The folder of a lab and what stands in it."""

    root: Path

    @property
    def manifest(self) -> Path:
        return self.root / "manifest.json"

    @property
    def corpus(self) -> Path:
        return self.root / "corpus.jsonl"

    def questions(self, split: str) -> Path:
        """The parquet file of ``train``, ``dev`` or ``test``."""
        return self.root / f"{split}.parquet"

    @property
    def train(self) -> Path:
        return self.questions("train")

    @property
    def dev(self) -> Path:
        return self.questions("dev")

    @property
    def test(self) -> Path:
        return self.questions("test")

    @property
    def policy(self) -> Path:
        return self.root / "policy"

    @property
    def encoder(self) -> Path:
        return self.root / "encoder"

    @property
    def index(self) -> Path:
        return self.root / "index"
