"""HotpotQA's questions in two halves, the index of their paragraphs, and the policy's supervised start on one half: on
demonstrations of a search over two articles, with the index's real results."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import compress
from pathlib import Path

import pyarrow.parquet as parquet
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from verl_credit.built_folder import Progress
from verl_credit.precision import cpu_precision
from verl_credit.turns.rollout.search.wire import SCHEMA, Page, format_pages
from verl_credit.worlds.data.prepare import prepare
from verl_credit.worlds.data.records import PrepareError
from verl_credit.worlds.real.packages import RealError
from verl_credit.worlds.supervised import token_losses, updates
from verl_credit_retriever.encoder import SentenceEncoder
from verl_credit_retriever.index.build import build_index
from verl_credit_retriever.index.search import SearchIndex

MOST, HELD_OUT = 70, 35
Demo = tuple[list[int], list[int]]  # token ids, 1 where the policy wrote the token
Search = Callable[[str], list[Page]]  # query -> pages, best first


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

    chat_template: str | None
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
        raise RealError(f"real.questions={questions}: no paragraphs; expected HotpotQA's distractor setting")
    build_index(folder / "data" / "corpus.jsonl", _encoder(encoder), folder / "index")
    return tally.files


def _encoder(folder: Path) -> SentenceEncoder:
    """The encoder, which was trained without prefixes."""
    return SentenceEncoder(folder, query_prefix="", passage_prefix="")


@dataclass(frozen=True)
class Supported:
    """A question with the titles of the articles that support its answer."""

    prompt: list[dict]
    question: str
    answer: str
    titles: tuple[str, ...]

    @classmethod
    def of(cls, row: dict) -> Supported:
        """The question of a row of `prepare`."""
        about, (answer, *_) = row["extra_info"], row["reward_model"]["ground_truth"]["target"]
        return cls(row["prompt"], about["question"], answer, tuple(about["supporting"]))


def demonstrations(question: Supported, search: Search, max_page_chars: int) -> list[list[dict]]:
    """Conversations that end with the answer, one per first query.

    The first query is the question itself, or the title of an article that the question names; the next one is the title
    of an article that is not among the pages yet, if the question or a page names it. Conversations whose answer is on no
    page are dropped, because they would teach the policy to invent things; yes and no stay where every article was found.
    """
    if not question.titles:
        return []
    named = [title for title in map(_plain, question.titles) if title in question.question]
    queries = [question.question, *named[:1]]
    conversations = (_converse(question, first, search, max_page_chars) for first in queries)
    return [messages for messages in conversations if messages is not None]


def _converse(question: Supported, first: str, search: Search, max_page_chars: int) -> list[dict] | None:
    messages, read, seen, query = list(question.prompt), "", set(), first
    while query is not None:
        pages = search(query)
        text = format_pages(pages, max_page_chars)
        function = {"name": SCHEMA["function"]["name"], "arguments": {"query": query}}
        calls = [{"type": "function", "function": function}]
        messages += [
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "content": text},
        ]
        read += text
        seen |= {page.title for page in pages}
        known = question.question + read
        left = [t for t in question.titles if t not in seen and _plain(t) != query and _plain(t) in known]
        more = left and len(messages) < 2 * len(question.titles) + len(question.prompt)
        query = _plain(left[0]) if more else None
    proven = set(question.titles) <= seen if question.answer in ("yes", "no") else question.answer in read
    answer = {"role": "assistant", "content": f"<answer>{question.answer}</answer>"}
    return [*messages, answer] if proven else None


def _plain(title: str) -> str:
    """The title without its qualifier: "Kiss and Tell (1945 film)" becomes "Kiss and Tell"."""
    return re.sub(r" \([^)]*\)$", "", title)


def encode(messages: Sequence[dict], tokenizer, chat_template: str) -> tuple[list[int], list[int]]:
    """(token ids, 1 where the policy writes), as the chat template writes the conversation.

    The policy writes the template's text after the header of an assistant's turn, its end included. Raises RealError for a
    template that leaves a call out, or that writes earlier turns in another way when a turn follows.
    """
    render = partial(
        tokenizer.apply_chat_template, tools=[SCHEMA], chat_template=chat_template, tokenize=False
    )
    ids, mask, text = [], [], ""
    for n, message in enumerate(messages):
        if message["role"] == "assistant":
            before = render(messages[:n], add_generation_prompt=True)
            answered = render(messages[: n + 1]).rstrip("\n")
            if not before.startswith(text) or not answered.startswith(before):
                raise RealError("the chat template writes earlier turns in another way when a turn follows")
            for call in message.get("tool_calls", ()):
                query = call["function"]["arguments"]["query"]
                if json.dumps(query, ensure_ascii=False) not in answered[len(before) :]:
                    raise RealError(f"the chat template leaves out the search for {query!r}")
            for part, by_policy in ((before[len(text) :], 0), (answered[len(before) :], 1)):
                new = tokenizer.encode(part, add_special_tokens=False)
                ids, mask = ids + new, mask + [by_policy] * len(new)
            text = answered
    return ids, mask


def write_start(
    folder: Path, policy: Path, encoder: Path, multihop: Path, view: View, seed: int, progress: Progress
) -> Mapping[str, object]:
    """The policy after demonstrations on the training half. Raises RealError."""
    began = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(policy)
    index, ask = SearchIndex.load(multihop / "index"), _encoder(encoder)

    def search(query: str) -> list[Page]:
        (hits,) = index.search(ask.encode_queries([query]), view.topk)
        pages = []
        for document, score in hits:
            title, _, text = document["contents"].partition("\n")
            pages.append(Page(document["id"], title, text, score))
        return pages

    conversations = [
        messages
        for row in parquet.read_table(multihop / "data" / "train.parquet").to_pylist()
        for messages in demonstrations(Supported.of(row), search, view.max_page_chars)
    ]
    try:
        written = [encode(messages, tokenizer, view.chat_template) for messages in conversations]
    except RealError as error:
        raise RealError(f"actor_rollout_ref.model.custom_chat_template: {error}") from None
    fits = [len(ids) <= view.max_tokens for ids, _ in written]
    demos, conversations = (list(compress(rows, fits)) for rows in (written, conversations))
    if not demos:
        within = f"within {view.max_tokens} tokens"
        raise RealError(f"real.questions: no training question whose answer the index finds {within}")
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
