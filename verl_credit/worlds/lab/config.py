"""The two sizes of the lab: ``full`` learns, ``tiny`` is for tests and builds in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from verl_credit.worlds.lab.demos import DemoStyle
from verl_credit.worlds.lab.policy import WarmStart
from verl_credit.worlds.lab.world import WorldSize

# Increase this whenever a build would give another lab than before; cached labs are then rebuilt.
GENERATOR_VERSION = 2


@dataclass(frozen=True)
class Gate:
    """After the warm start, sampled dev EM must be in [low, high]; below it, training continues in chunks."""

    low: float = 0.24
    high: float = 0.45
    chunk_steps: int = 150
    max_chunks: int = 3
    questions: int = 384


@dataclass(frozen=True)
class LabConfig:
    """All settings of a lab except its seed."""

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
