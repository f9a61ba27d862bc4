"""What the world's policy reads and writes: prose of the lab's words, prepared trajectories, and the tokenizer of both."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import yaml
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from gpu.machine import ROOT
from verl_credit.worlds.lab.encyclopedia import FILLER, RELATIONS, Article, Question, World
from verl_credit.worlds.lab.protocol import PAD, TAGS, TURN_END, TURN_START, search_turn

MERGES = 500  # about four characters of the pages are a token then, as `plan` assumes
CHAT = ROOT / "recipes" / "real_cpu.yaml"


@dataclass(frozen=True)
class Lengths:
    """How long pages and thoughts are."""

    page_chars: int
    thought_words: tuple[int, int]


# Pages as long as search.max_page_chars allows in the multi-hop recipe.
REAL, TINY = Lengths(1000, (20, 120)), Lengths(0, (0, 4))


def prose(world: World, rng: random.Random, words: int) -> str:
    """Sentences of about ``words`` words."""
    names, sentences, written = world.names(), [], 0
    while written < words:
        kind = rng.choice(list(RELATIONS))
        sentence = (
            f"The {rng.choice(FILLER)} {kind} {rng.choice(names)} has the "
            f"{rng.choice(list(RELATIONS[kind]))} {rng.choice(names)}."
        )
        sentences.append(sentence)
        written += len(sentence.split())
    return " ".join(sentences)


def page(article: Article, world: World, rng: random.Random, lengths: Lengths) -> str:
    """The article, followed by prose up to the length of a page."""
    missing = lengths.page_chars - len(article.contents)
    return article.contents + f" {prose(world, rng, missing // 5)}"[: max(missing, 0)]


def trajectories(question: Question, world: World, rng: random.Random, lengths: Lengths) -> list[list[str]]:
    """Four trajectories of 1 to 6 turns that search; their first queries differ, so that all turns' gains can.

    The first takes the question's path, the second asks the whole question before it and searches on to the end, the
    third searches beside the path, and the fourth takes the path later.
    """
    path = [f"{name} {relation}" for name, relation in zip(question.path, question.relations, strict=False)]
    others = [query for name, relation in world.articles if (query := f"{name} {relation}") not in path]
    aside = rng.sample(others, 10)
    plans = (path, [question.text, *path, *aside][:6], aside[6:8], [aside[8], *path, aside[9]][:4])

    def turn(query: str) -> str:
        words = rng.randint(*lengths.thought_words)
        return search_turn(query, prose(world, rng, words))

    return [[turn(query) for query in plan] for plan in plans]


def make_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE of ``texts`` in Qwen3's format, and a template that writes tools, calls and observations."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    size = len(alphabet) + MERGES
    core.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    special = (PAD, TURN_START, TURN_END)
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in TAGS])
    template = yaml.safe_load(CHAT.read_text())["actor_rollout_ref"]["model"]["custom_chat_template"]
    return _fast(core, template)


def padded(tokenizer: PreTrainedTokenizerFast, vocabulary: int) -> PreTrainedTokenizerFast:
    """The tokenizer with a word for every id below ``vocabulary``; texts have the same tokens as before.

    A policy with random weights samples any id, and engines draw none above the tokenizer's. No merge makes such a word.
    """
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    words = content["model"]["vocab"]
    words |= {added["content"]: added["id"] for added in content["added_tokens"]}
    words |= {f"Ġword{number}": number for number in range(len(words), vocabulary)}
    return _fast(Tokenizer.from_str(json.dumps(content)), tokenizer.chat_template)


def _fast(core: Tokenizer, template: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=TURN_END, chat_template=template,
        model_input_names=["input_ids", "attention_mask"], clean_up_tokenization_spaces=False,
    )  # fmt: skip


def token_ids(tokenizer: PreTrainedTokenizerFast, turns: Sequence[str]) -> list[list[int]]:
    return [tokenizer.encode(turn, add_special_tokens=False) for turn in turns]
