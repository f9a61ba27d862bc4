"""Builds DoorKey's world into a folder: the rows of its tasks, and a policy that imitates a walk that errs."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from verl_credit.built_folder import Progress, reuse_or_build
from verl_credit.config.keys import Environment
from verl_credit.errors import PreflightError
from verl_credit.precision import one_thread
from verl_credit.worlds.data.env_rows import prepare_environment
from verl_credit.worlds.doorkey.dialogue import Dialogue, doorkey_tokenizer
from verl_credit.worlds.doorkey.moves import ACTIONS, DoorKey, Layout, Moves, shortest, walk
from verl_credit.worlds.lab.config import WarmStart
from verl_credit.worlds.lab.demos import Segment
from verl_credit.worlds.lab.warm_start import Trainer, encode_demo, make_policy
from verl_credit.worlds.rollouts.sampler import Ask, ModelDecoder, TurnSampler, uniforms

NAME, PARTS = "DoorKey's world", ("data", "policy")
VERSION = 2  # increased whenever a build would give other files than before
GRID, MAX_STEPS, MAX_NEW_TOKENS = 6, 25, 8
"""Those of recipes/doorkey.yaml (a test compares)."""
ERRS = 0.4
"""The share of random actions in a demonstration. They are not imitated, but seen: the policy learns to go on after them."""
TRAIN, HELD_OUT, SHOWN, ASKED = 0, 1_000_000, 2_000_000, 3_000_000
"""Where the seeds of training rows, of held-out rows, of demonstrations and of the gate's tasks begin."""


@dataclass(frozen=True)
class Size:
    train: int
    held_out: int
    demonstrations: int
    chunk: int
    """Supervised steps between two looks at the gate."""
    most_chunks: int
    low: float | None
    """Supervised steps end where the policy solves this share of the tasks; None: after a chunk."""


SIZES = {"full": Size(400, 64, 300, 4, 80, 0.2), "tiny": Size(32, 8, 24, 4, 1, None)}


def build_doorkey(
    directory: Path, *, world_seed: int = 0, size: str = "full", progress: Progress = lambda share, text: None
) -> None:
    """Build the world of ``world_seed`` in ``directory``, or reuse a valid one; the build uses one thread.

    Raises FileExistsError where the folder has other files, and PreflightError where the policy solves too few tasks.
    """

    def fill(folder: Path) -> dict:
        with one_thread():
            return _fill(folder, SIZES[size], world_seed, progress)

    settings = {"version": VERSION, "world_seed": world_seed, "size": size}
    reuse_or_build(Path(directory).resolve(), settings, fill, parts=PARTS, name=NAME, progress=progress)


def _fill(folder: Path, size: Size, seed: int, progress: Progress) -> dict:
    began, first = time.monotonic(), 10_000_000 * seed
    progress(0.0, "rows")
    given = Environment(
        path="minigrid",
        kwargs={"id": f"MiniGrid-DoorKey-{GRID}x{GRID}-v0", "actions": [*ACTIONS]},
        processes=1,
    )
    rows = {"train": (first + TRAIN, size.train), "test": (first + HELD_OUT, size.held_out)}
    splits = {name: range(start, start + count) for name, (start, count) in rows.items()}
    prepare_environment(given, splits, folder / "data")
    progress(0.1, "demonstrations")
    tokenizer, written = doorkey_tokenizer(), demonstrations(first + SHOWN, size.demonstrations)
    demos = [encode_demo(segments, tokenizer, set(), 1.0) for segments in written]
    style = WarmStart(warmup=2, short_steps=0)
    trainer = Trainer(make_policy(tokenizer, seed), demos, [], style, seed)
    for chunk in range(1, size.most_chunks + 1):
        trainer.run(size.chunk)
        solved = success(trainer.model, tokenizer, range(first + ASKED, first + ASKED + 64))
        progress(
            0.2 + 0.8 * chunk / size.most_chunks,
            f"policy: {solved:.3f} of the tasks after {trainer.step} steps",
        )
        if size.low is None or solved >= size.low:
            break
    else:
        reached = f"the policy solves {solved:.3f} of the tasks after {trainer.step} supervised steps, below {size.low}"
        raise PreflightError(f"world seed {seed}: {reached}; use another world seed")
    transformers_logging.disable_progress_bar()
    trainer.model.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    measured = {"solved": round(solved, 4), "supervised_steps": trainer.step}
    return {"measured": measured | {"build_seconds": round(time.monotonic() - began, 1)}}


def demonstrations(first: int, count: int) -> Iterator[list[Segment]]:
    """Walks on shortest ways, in which each action is a random one with probability `ERRS`: not one that is imitated."""
    tables: dict[Layout, Moves] = {}
    tokenizer, names = doorkey_tokenizer(), [*ACTIONS]
    for seed in range(first, first + count):
        game, rng = DoorKey(GRID, seed), random.Random(seed)
        state, dialogue = game.state, Dialogue(GRID, seed, tokenizer)
        if state not in tables.get(game.layout, {}):
            tables.setdefault(game.layout, {}).update(walk([state], game.moves))
        moves, erred = tables[game.layout], []
        best = shortest(moves)
        while not dialogue.now.done and len(erred) < MAX_STEPS:
            erred.append(rng.random() < ERRS)
            action = rng.choice(range(len(names)) if erred[-1] else best[state])
            dialogue.act(names[action])
            state = moves[state][action][0]
        turns = iter(erred)
        yield [(text, by_policy and not next(turns)) for text, by_policy in dialogue.segments]


def success(policy: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, seeds: range) -> float:
    """The share of the seeds' tasks that the policy solves with sampled actions."""
    sampler = TurnSampler(ModelDecoder(policy, tokenizer.pad_token_id), [tokenizer.eos_token_id])
    playing = {seed: Dialogue(GRID, seed, tokenizer) for seed in seeds}
    ids = {seed: () for seed in seeds}
    solved = 0
    for step in range(MAX_STEPS):
        for seed, one in playing.items():
            ids[seed] += tuple(tokenizer(one.segments[-1][0], add_special_tokens=False)["input_ids"])
        drawn = [uniforms(seed, step, particles=1, tokens=MAX_NEW_TOKENS) for seed in playing]
        texts = sampler.sample([Ask(ids[seed], u) for seed, u in zip(playing, drawn, strict=True)])
        for (seed, one), (turn,) in zip(list(playing.items()), texts, strict=True):
            ids[seed] += turn
            ended = turn[-1] == tokenizer.eos_token_id
            one.act(tokenizer.decode(turn[: -1 if ended else None]), ended)
            if one.now.done:
                solved += bool(one.now.success)
                del playing[seed]
        if not playing:
            break
    return solved / len(seeds)
