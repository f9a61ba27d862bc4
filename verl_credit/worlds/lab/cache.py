"""The files of a lab, and the settings that its manifest holds."""

from __future__ import annotations

from pathlib import Path

from verl_credit.built_folder import MANIFEST
from verl_credit.worlds.lab.config import GENERATOR_VERSION

NAME = "the lab"
PARTS = ("corpus.jsonl", "train.parquet", "dev.parquet", "test.parquet", "policy", "encoder", "index")


class LabPaths:
    """The files in the folder ``root`` of a lab."""

    def __init__(self, root: Path):
        self.root = root
        self.manifest, self.corpus = root / MANIFEST, root / "corpus.jsonl"
        self.train, self.dev, self.test = (self.questions(split) for split in ("train", "dev", "test"))
        self.policy, self.encoder, self.index = root / "policy", root / "encoder", root / "index"

    def questions(self, split: str) -> Path:
        """The parquet file of ``train``, ``dev`` or ``test``."""
        return self.root / f"{split}.parquet"


def settings_of(world_seed: int, size: str) -> dict[str, object]:
    """What makes a lab another one."""
    return {"generator_version": GENERATOR_VERSION, "world_seed": world_seed, "size": size}
