"""The settings of the lab by size (``full`` to learn in, ``tiny`` for tests) and by the hops of its questions; its files."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from verl_credit.built_folder import MANIFEST
from verl_credit.worlds.lab.demos import DemoStyle
from verl_credit.worlds.lab.encyclopedia import HOP_SHARES, WorldSize
from verl_credit.worlds.lab.limits import MOST_HOPS

# Increase this whenever a build would give another lab than before; cached labs are then rebuilt.
GENERATOR_VERSION = 2


@dataclass(frozen=True)
class WarmStart:
    """The supervised stage."""

    steps: int = 1000
    batch: int = 16
    muon_lr: float = 0.02
    adamw_lr: float = 3e-3
    weight_decay: float = 0.05
    warmup: int = 30
    short_share: float = 0.35
    """the first ``short_steps`` use only this share of the demonstrations, the shortest ones"""
    short_steps: int = 300
    name_weight: float = 2.0
    """weight of name tokens in the loss, because copying is hard to learn"""


@dataclass(frozen=True)
class Gate:
    """Sampled dev EM must be in [low, high] after the warm start; below it, training continues in chunks."""

    low: float = 0.24
    high: float = 0.45
    chunk_steps: int = 150
    max_chunks: int = 3
    scales_logits: bool = False
    """In place of a chunk the logits are scaled, so that a policy that follows the chain greedily errs as often as the gate
    wants when it samples."""


@dataclass(frozen=True)
class LabConfig:
    """All settings of a lab except its seed."""

    hops: int | None = None
    """every question has so many; None: the mix ``question_hops``"""
    question_hops: dict[int, float] = field(default_factory=lambda: HOP_SHARES)
    demo_hops: dict[int, float] = field(default_factory=lambda: {1: 0.30, 2: 0.40, 3: 0.30})
    """more long questions than in the splits: demonstrations that stop early contain fewer later hops"""
    world: WorldSize = field(default_factory=WorldSize)
    encoder_steps: int = 100
    demonstrations: int = 6000
    style: DemoStyle = field(default_factory=DemoStyle)
    warm_start: WarmStart = field(default_factory=WarmStart)
    gate: Gate | None = field(default_factory=Gate)


SIZES = {
    "full": LabConfig(),
    "tiny": LabConfig(
        world=WorldSize(people=80, companies=40, towns=40, works=40, train=64, dev=24, test=24),
        encoder_steps=40,
        demonstrations=600,
        warm_start=WarmStart(steps=100, short_steps=50),
        gate=None,
    ),
}

TURNS_A_BATCH = 40
"""Longer demonstrations come in smaller batches, with about as many turns of the policy as the mix has."""


def config_of(size: str, hops: int | None) -> LabConfig:
    """Raises ValueError for an unknown size and for hops outside the range."""
    if size not in SIZES:
        raise ValueError(f"size={size!r}: expected one of {sorted(SIZES)}")
    if hops is None:
        return SIZES[size]
    if hops not in range(1, MOST_HOPS + 1):
        raise ValueError(f"hops={hops!r}: expected a whole number from 1 to {MOST_HOPS}, or None")
    config, shares = SIZES[size], {hops: 1.0}
    steps, batch = min(config.warm_start.steps, 500), TURNS_A_BATCH // (hops + 1)
    return replace(
        config,
        hops=hops,
        question_hops=shares,
        demo_hops=shares,
        demonstrations=config.demonstrations // 2,
        style=replace(config.style, stop_early=0.0, wrong_answer=0.0, quote=1.0),
        warm_start=replace(config.warm_start, steps=steps, batch=batch, short_steps=0),
        gate=config.gate and Gate(low=0.25, chunk_steps=0, max_chunks=8, scales_logits=True),
    )


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


def settings_of(world_seed: int, size: str, hops: int | None = None) -> dict[str, object]:
    """The settings that determine a lab's contents."""
    return {"generator_version": GENERATOR_VERSION, "world_seed": world_seed, "size": size, "hops": hops}
