"""HotpotQA's questions in two halves, the index of their paragraphs, and the policy's supervised start on one half."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import compress
from pathlib import Path

import pyarrow.parquet as parquet
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from verl_credit.built_folder import Progress
from verl_credit.precision import cpu_precision
from verl_credit.turns.search.protocol import Page
from verl_credit.worlds.data.prepare import prepare
from verl_credit.worlds.data.records import PrepareError
from verl_credit.worlds.real.demonstrations import Supported, demonstrations, encode
from verl_credit.worlds.real.packages import RealError
from verl_credit.worlds.supervised import token_losses, updates
from verl_credit_retriever.encoder import SentenceEncoder
from verl_credit_retriever.index.build import build_index
from verl_credit_retriever.index.search import SearchIndex

MOST, HELD_OUT = 70, 35
Demo = tuple[list[int], list[int]]  # token ids, 1 where the policy wrote the token


@dataclass(frozen=True)
class WarmStart:
    """The supervised start; ``warmup`` is in updates."""

    epochs: int = 3
    batch: int = 4
    lr: float = 5e-5
    warmup: int = 5


@dataclass(frozen=True)
class View:
    """The text of the tool and of its results for the policy, as in the recipe."""

    chat_template: str
    topk: int
    max_page_chars: int
    max_tokens: int
    """the longest conversation"""


def write_questions(folder: Path, encoder: Path, questions: str, seed: int) -> Mapping[str, object]:
    """``data/`` (train.parquet, val.parquet, corpus.jsonl of both) and ``index/``. Raises RealError."""
    try:
        local = Path(questions).expanduser().exists()
        tally = prepare(
            "hotpotqa", questions, folder / "data", limit=MOST, val_size=HELD_OUT, seed=seed,
            splits=None if local else ["val"],
        )  # fmt: skip
    except PrepareError as error:
        raise RealError(f"real.questions={questions}: {error}") from error
    if "corpus.jsonl" not in tally.files:
        raise RealError(f"real.questions={questions}: no paragraphs; expected HotpotQA's distractor setting, whose "
                        "questions have ten paragraphs each")  # fmt: skip
    build_index(folder / "data" / "corpus.jsonl", _encoder(encoder), folder / "index")
    return {name: counts for name, counts in tally.files.items()}


def _encoder(folder: Path) -> SentenceEncoder:
    """The encoder, which was trained without prefixes."""
    return SentenceEncoder(folder, query_prefix="", passage_prefix="")


def write_start(
    folder: Path, policy: Path, encoder: Path, multihop: Path, view: View, seed: int, progress: Progress
) -> Mapping[str, object]:
    """The policy after demonstrations on the training half. Raises RealError."""
    began = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(policy)
    index, ask = SearchIndex.load(multihop / "index"), _encoder(encoder)

    def search(query: str) -> list[Page]:
        (hits,) = index.search(ask.encode_queries([query]), view.topk)
        return [_page(document, score) for document, score in hits]

    conversations = [
        messages
        for question in _training_questions(multihop)
        for messages in demonstrations(question, search, view.max_page_chars)
    ]
    try:
        written = [encode(messages, tokenizer, view.chat_template) for messages in conversations]
    except RealError as error:
        raise RealError(f"actor_rollout_ref.model.custom_chat_template: {error}") from None
    fits = [len(ids) <= view.max_tokens for ids, _ in written]
    demos, conversations = (list(compress(rows, fits)) for rows in (written, conversations))
    if not demos:
        raise RealError(
            f"real.questions: no training question whose answer the index finds in {view.max_tokens} tokens"
        )
    model = AutoModelForCausalLM.from_pretrained(policy)
    style, precision = WarmStart(), cpu_precision()

    def report(step: int, steps: int, loss: float) -> None:
        progress(step / steps, f"supervised start in {precision}: update {step} of {steps}, loss {loss:.3f}")

    losses = train(model, demos, style, seed, report)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "demonstrations.jsonl").write_text(
        "".join(json.dumps(messages) + "\n" for messages in conversations)
    )
    return {
        "demonstrations": len(demos),
        "too_long": len(fits) - len(demos),
        "tokens": sum(len(ids) for ids, _ in demos),
        "tokens_of_policy": sum(sum(mask) for _, mask in demos),
        "losses": [round(loss, 4) for loss in losses],
        "seconds": round(time.monotonic() - began, 1),
        "warm_start": asdict(style),
        "precision": precision,
    }


def start_settings(
    view: View, questions: Mapping[str, object], policy: Mapping[str, object]
) -> dict[str, object]:
    """The settings that determine a start's weights."""
    text = json.dumps([asdict(view), asdict(WarmStart()), questions, policy], sort_keys=True)
    return {"made_of": hashlib.sha256(text.encode()).hexdigest()}


def _training_questions(multihop: Path) -> list[Supported]:
    rows = parquet.read_table(multihop / "data" / "train.parquet").to_pylist()
    return [
        Supported(
            prompt=row["prompt"],
            question=row["extra_info"]["question"],
            answer=row["reward_model"]["ground_truth"]["target"][0],
            titles=tuple(row["extra_info"]["supporting"]),
        )
        for row in rows
    ]


def _page(document: Mapping[str, str], score: float) -> Page:
    title, _, text = document["contents"].partition("\n")
    return Page(document["id"], title, text, score)


def train(
    model: PreTrainedModel,
    demos: Sequence[Demo],
    style: WarmStart,
    seed: int,
    on_step: Callable[[int, int, float], None] = lambda step, steps, loss: None,
) -> list[float]:
    """The loss of every update: the mean over the tokens that the policy wrote, in nats.

    AdamW updates weights in float32; the forward has the precision that the CPU multiplies fastest. The learning rate rises
    over ``warmup`` updates and falls linearly to zero.
    """
    steps, losses = style.epochs * -(-len(demos) // style.batch), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=style.lr, weight_decay=0.0, betas=(0.9, 0.95))
    scales = [min((step + 1) / style.warmup, (steps - step) / steps) for step in range(steps)]
    batches = _batches(demos, style, random.Random(f"supervised start {seed}"))
    for loss in updates(model, [optimizer], scales, lambda: _backward(model, next(batches))):
        losses.append(loss)
        on_step(len(losses), steps, loss)
    return losses


def _batches(demos: Sequence[Demo], style: WarmStart, rng: random.Random) -> Iterator[list[Demo]]:
    for _ in range(style.epochs):
        order = rng.sample(range(len(demos)), len(demos))
        for start in range(0, len(order), style.batch):
            yield [demos[i] for i in order[start : start + style.batch]]


def _backward(model: PreTrainedModel, batch: Sequence[Demo]) -> float:
    """A row at a time: there is no padding, and only the logits of one row are held."""
    written, loss = sum(sum(mask) for _, mask in batch), 0.0
    for ids, mask in batch:
        chosen_1_T = torch.tensor([mask], dtype=torch.bool)
        with torch.autocast("cpu", torch.bfloat16, enabled=cpu_precision() == "bf16"):
            part = token_losses(model, torch.tensor([ids]), chosen_1_T, reduction="sum") / written
        part.backward()
        loss += part.item()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return loss
