"""A world on real text for tests: HotpotQA paragraphs, byte-level tokenizer, a policy that calls the tool.

The policy is taught the format only (what it asks and answers is noise): enough for real tool calls, turns
and gains, in seconds and without any download.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from verl_credit.worlds.lab.protocol import (
    CALL_HEAD,
    CALL_TAIL,
    CHAT_TEMPLATE,
    TURN_END,
    answer_turn,
    search_turn,
)
from verl_credit_retriever.index.search import build_index

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<answer>", "</answer>")
N_QUESTIONS = 8


@dataclass(frozen=True)
class ByteWorld:
    root: Path

    @property
    def overrides(self) -> list[str]:
        return [
            f"data.train_files={self.root}/train.parquet",
            f"data.val_files={self.root}/train.parquet",
            f"actor_rollout_ref.model.path={self.root}/policy",
            "data.max_prompt_length=256",
            "data.max_response_length=1200",
            "search.require_schema=false",  # its policy has seen calls, its template writes no tools
            "search.max_page_chars=100",
            "search.max_searches=2",
            "search.max_new_tokens=48",
        ]


def build_byte_world(root: Path, hotpot_file: Path, *, steps: int = 150) -> ByteWorld:
    torch.manual_seed(0)
    rng = random.Random(0)
    rows = sorted(json.loads(hotpot_file.read_text()), key=lambda row: len(row["question"] + row["answer"]))
    rows = rows[:N_QUESTIONS]
    _write_corpus(root, rows)
    _write_questions(root, rows)
    tokenizer = make_tokenizer()
    _train_policy(root / "policy", tokenizer, rows, rng, steps)
    _write_encoder(root / "encoder", tokenizer)
    build_index(root / "corpus.jsonl", root / "encoder", root / "index")
    return ByteWorld(root)


def _write_corpus(root: Path, rows: list[dict]) -> None:
    pages = {title: "".join(sentences) for row in rows for title, sentences in _context(row)}
    with (root / "corpus.jsonl").open("w", encoding="utf-8") as file:
        for number, (title, text) in enumerate(pages.items()):
            file.write(json.dumps({"id": str(number), "contents": f"{title}\n{text}"}) + "\n")


def _context(row: dict) -> list[tuple[str, list[str]]]:
    context = row["context"]
    if isinstance(context, dict):
        return list(zip(context["title"], context["sentences"], strict=True))
    return [(title, sentences) for title, sentences in context]


def _write_questions(root: Path, rows: list[dict]) -> None:
    table = [
        {
            "data_source": "hotpotqa",
            "agent_name": "search_agent",
            "prompt": [{"role": "user", "content": row["question"]}],
            "ability": "qa",
            "reward_model": {"style": "rule", "ground_truth": {"target": [row["answer"]]}},
            "extra_info": {"index": number, "split": "train", "question": row["question"]},
        }
        for number, row in enumerate(rows)
    ]
    parquet.write_table(pa.Table.from_pylist(table), root / "train.parquet")


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocab = {token: i for i, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.add_tokens([AddedToken(t, special=False, normalized=False) for t in (*TAGS, CALL_HEAD, CALL_TAIL)])
    return fast


def _train_policy(folder: Path, tokenizer, rows: list[dict], rng: random.Random, steps: int) -> None:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    words = sorted(
        {word for row in rows for word in row["question"].split() if 3 < len(word) < 9 and word.isalpha()}
    )
    for _ in range(steps):
        samples = [_demonstration(tokenizer, rng.choice(rows), words, rng) for _ in range(8)]
        width = max(len(ids) for ids, _ in samples)
        ids = torch.tensor([i + [tokenizer.pad_token_id] * (width - len(i)) for i, _ in samples])
        labels = torch.tensor(
            [
                [t if m else -100 for t, m in zip(i, k, strict=True)] + [-100] * (width - len(i))
                for i, k in samples
            ]
        )
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _demonstration(tokenizer, row: dict, words: list[str], rng: random.Random) -> tuple[list[int], list[int]]:
    """(token ids, 1 where the policy wrote): one search for some word, then some answer."""
    query = " ".join(rng.choices(words, k=2))
    page = rng.choice(_context(row))
    messages = [{"role": "user", "content": row["question"]}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    observed = (
        f"\n<|im_start|>user\n<tool_response>\nPage 1: {page[0]}\n{''.join(page[1])[:60]}\n</tool_response>"
    )
    parts = [
        (prompt, 0),
        (search_turn(query), 1),
        (f"{observed}{TURN_END}\n<|im_start|>assistant\n", 0),
        (answer_turn(rng.choice([row["answer"], page[0]])[:24]), 1),
    ]
    ids, mask = [], []
    for text, policy in parts:
        piece = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids, mask = ids + piece, mask + [policy] * len(piece)
    return ids, mask


def _write_encoder(folder: Path, tokenizer) -> None:
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=512,
    )
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
