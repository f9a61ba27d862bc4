"""Builds the lab into a folder: world, questions, encoder, index, warm-started policy, manifest."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

import pyarrow
import pyarrow.parquet
from transformers.utils import logging as transformers_logging

from verl_credit.built_folder import Progress, reuse_or_build
from verl_credit.precision import one_thread
from verl_credit.worlds.lab.config import NAME, PARTS, LabConfig, LabPaths, config_of, settings_of
from verl_credit.worlds.lab.encoder import train_encoder
from verl_credit.worlds.lab.encyclopedia import make_splits, make_world, to_rows
from verl_credit.worlds.lab.evaluate import LocalRetriever
from verl_credit.worlds.lab.limits import MAX_NEW_TOKENS, TOP_K, limits_of
from verl_credit.worlds.lab.protocol import make_tokenizer
from verl_credit.worlds.lab.warm_start import warm_start
from verl_credit_retriever.index.search import build_index


def recipe_of(hops: int | None) -> dict[str, object]:
    """What a run's configuration must have, in tokens of the lab's tokenizer."""
    fixed = {"max_new_tokens_per_turn": MAX_NEW_TOKENS, "top_k": TOP_K, "tools_in_prompt": False}
    return asdict(limits_of(hops)) | fixed


def build_lab(
    directory: Path,
    *,
    world_seed: int = 0,
    size: str = "full",
    hops: int | None = None,
    progress: Progress = lambda share, text: None,
) -> LabPaths:
    """Build the lab of ``world_seed`` in ``directory``, or reuse a valid one. Its questions have ``hops`` hops; None: one to
    three.

    The build uses one thread, and so gives the same bits on every processor of one kind. Torch's number of threads and
    global random state are unchanged afterwards.

    Raises ValueError for an unknown size or number of hops, FileExistsError when ``directory`` contains other files, and
    LabGateError when the policy's exact match is outside the gate.
    """
    config = config_of(size, hops)
    directory = Path(directory).resolve()

    def fill(folder: Path) -> dict:
        with one_thread():
            return _fill(LabPaths(folder), config, world_seed, progress)

    settings = settings_of(world_seed, size, hops)
    reuse_or_build(directory, settings, fill, parts=PARTS, name=NAME, progress=progress)
    return LabPaths(directory)


def _fill(paths: LabPaths, config: LabConfig, seed: int, progress: Progress) -> dict:
    started = time.monotonic()
    progress(0.0, "world and tokenizer")
    world = make_world(seed, config.world)
    tokenizer = make_tokenizer(world.names())
    splits = make_splits(world, config.world, seed, hop_shares=config.question_hops)
    articles = ({"id": article.id, "contents": article.contents} for article in world.articles.values())
    paths.corpus.write_text("".join(json.dumps(row) + "\n" for row in articles))
    for split, questions in splits.items():
        rows = to_rows(questions, split)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), paths.questions(split))
    encoder = train_encoder(
        world, tokenizer, seed=seed, steps=config.encoder_steps,
        on_step=lambda step: progress(0.05 * step / config.encoder_steps, f"encoder: step {step}"),
    )  # fmt: skip
    transformers_logging.disable_progress_bar()
    encoder.save_pretrained(paths.encoder)
    tokenizer.save_pretrained(paths.encoder)
    progress(0.05, "index")
    build_index(paths.corpus, paths.encoder, paths.index)
    retriever = LocalRetriever(paths.encoder, paths.index)
    progress(0.06, "demonstrations")

    def show(share: float, text: str) -> None:
        progress(0.06 + 0.93 * share, text)

    policy, measured = warm_start(world, tokenizer, retriever, splits["dev"], config, seed, show)
    policy.save_pretrained(paths.policy)
    tokenizer.save_pretrained(paths.policy)
    measured |= {"build_seconds": round(time.monotonic() - started, 1)}
    measured |= {"articles": len(world.articles), **{f"questions_{s}": len(q) for s, q in splits.items()}}
    return {"recipe": recipe_of(config.hops), "measured": measured}
