"""HotpotQA's questions in two halves, the index of their paragraphs, and the policy's supervised start on one half."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import compress
from pathlib import Path

import pyarrow.parquet as parquet
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_credit.built_folder import Progress
from verl_credit.precision import cpu_precision
from verl_credit.turns.search.protocol import Page
from verl_credit.worlds.data.prepare import prepare
from verl_credit.worlds.data.records import PrepareError
from verl_credit.worlds.real.demonstrations import Supported, demonstrations, encode
from verl_credit.worlds.real.packages import RealError
from verl_credit.worlds.real.warm_start import WarmStart, train
from verl_credit_retriever.encoder import SentenceEncoder
from verl_credit_retriever.index.build import build_index
from verl_credit_retriever.index.search import SearchIndex

MOST, HELD_OUT = 70, 35


@dataclass(frozen=True)
class Shown:
    """How the policy is told of its tool and of what it found: as in the recipe."""

    chat_template: str
    topk: int
    max_page_chars: int
    max_tokens: int
    """of a conversation"""


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
    """It was trained without prefixes."""
    return SentenceEncoder(folder, query_prefix="", passage_prefix="")


def write_start(
    folder: Path, policy: Path, encoder: Path, multihop: Path, shown: Shown, seed: int, progress: Progress
) -> Mapping[str, object]:
    """The policy after demonstrations on the training half. Raises RealError."""
    began = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(policy)
    index, ask = SearchIndex.load(multihop / "index"), _encoder(encoder)

    def search(query: str) -> list[Page]:
        (hits,) = index.search(ask.encode_queries([query]), shown.topk)
        return [_page(document, score) for document, score in hits]

    told = [
        m
        for asked in _training_questions(multihop)
        for m in demonstrations(asked, search, shown.max_page_chars)
    ]
    try:
        written = [encode(messages, tokenizer, shown.chat_template) for messages in told]
    except RealError as error:
        raise RealError(f"actor_rollout_ref.model.custom_chat_template: {error}") from None
    fits = [len(ids) <= shown.max_tokens for ids, _ in written]
    demos, told = (list(compress(rows, fits)) for rows in (written, told))
    if not demos:
        raise RealError(
            f"real.questions: no training question whose answer the index finds in {shown.max_tokens} tokens"
        )
    model = AutoModelForCausalLM.from_pretrained(policy)
    style, precision = WarmStart(), cpu_precision()

    def say(step: int, steps: int, loss: float) -> None:
        progress(step / steps, f"supervised start in {precision}: update {step} of {steps}, loss {loss:.3f}")

    losses = train(model, demos, style, seed, say)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "demonstrations.jsonl").write_text("".join(json.dumps(messages) + "\n" for messages in told))
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
    shown: Shown, questions: Mapping[str, object], policy: Mapping[str, object]
) -> dict[str, object]:
    """What makes a start another one."""
    text = json.dumps([asdict(shown), asdict(WarmStart()), questions, policy], sort_keys=True)
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
