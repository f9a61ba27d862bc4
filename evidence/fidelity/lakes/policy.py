"""The policy: the lab's small Qwen3, warm-started on walks by the lab's trainer; and the folder that keeps it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from lakes.demos import WalkStyle, write_walks
from lakes.lakes import make_lakes
from lakes.text import HORIZON, grid_tokenizer
from lakes.world import Context, GridWorld
from verl_credit.built_folder import reuse_or_build
from verl_credit.precision import one_thread
from verl_credit.study.fidelity.subject import load_policy
from verl_credit.worlds.lab.warm_start import Trainer, WarmStart, encode_demo, make_policy
from verl_credit.worlds.rollouts.sampler import ModelDecoder, TurnSampler

VERSION = 1
"""Increase this whenever a build would give another policy than before."""


@dataclass(frozen=True)
class GridConfig:
    """All settings of a policy but its seed."""

    context: Context
    slippery: bool
    horizon: int = HORIZON
    walks: int = 3000
    style: WalkStyle = field(default_factory=WalkStyle)
    layers: int = 2
    steps: int = 300
    batch: int = 32


@dataclass(frozen=True)
class GridSubject:
    """A policy and its world."""

    world: GridWorld
    model: PreTrainedModel
    tokenizer: object

    def decoder(self) -> ModelDecoder:
        return ModelDecoder(self.model, self.tokenizer.pad_token_id)

    def sampler(self) -> TurnSampler:
        return TurnSampler(self.decoder(), [self.tokenizer.eos_token_id], drawable=len(self.tokenizer))


def grid_subject(
    folder: Path,
    config: GridConfig,
    seed: int = 0,
    progress: Callable[[float, str], None] = lambda share, text: None,
) -> GridSubject:
    """The policy in ``folder``: one that was built with these settings is used again, else it is built, by one thread."""

    def fill(into: Path) -> dict:
        begun = time.monotonic()
        with one_thread():
            model = _trained(config, seed, progress)
        model.save_pretrained(into / "policy")
        tokenizer.save_pretrained(into / "policy")
        return {"build_seconds": round(time.monotonic() - begun, 1)}

    transformers_logging.disable_progress_bar()  # a small model is written in no time
    tokenizer = grid_tokenizer(horizon=config.horizon)
    settings = {"version": VERSION, "seed": seed, **asdict(config)}
    reuse_or_build(
        Path(folder), settings, fill, parts=("policy",), name="the policy of the lakes", progress=progress
    )
    return GridSubject(_world(config, tokenizer), *load_policy(Path(folder) / "policy"))


def _world(config: GridConfig, tokenizer) -> GridWorld:
    return GridWorld(tokenizer, make_lakes(config.slippery), context=config.context, horizon=config.horizon)


def _trained(config: GridConfig, seed: int, progress: Callable[[float, str], None]) -> PreTrainedModel:
    tokenizer = grid_tokenizer(horizon=config.horizon)
    walks = write_walks(_world(config, tokenizer), config.style, config.walks, seed)
    demos = [encode_demo(segments, tokenizer, set(), 1.0) for segments in walks]
    # The lab's curriculum from short to long and its permuted names are about reading; here there is nothing to copy.
    style = WarmStart(steps=config.steps, batch=config.batch, short_share=1.0, short_steps=0)
    trainer = Trainer(make_policy(tokenizer, seed, layers=config.layers), demos, [], style, seed)
    trainer.run(config.steps, lambda step: progress(step / config.steps, f"supervised step {step}"))
    return trainer.model
