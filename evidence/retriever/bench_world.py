"""The benchmark's encoders with random weights, its queries, and its index of random unit vectors."""

import json
import random
import shutil
import zlib
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from verl_credit_retriever.encoder import SentenceEncoder
from verl_credit_retriever.index.search import build_index

SPECIALS = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
VOCABULARY, POSITIONS = 30522, 512
SHAPES = {
    "e5-base": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    },
    "tiny": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
}
PASSAGE_WORDS = 100  # as in wiki-18


def words() -> list[str]:
    """Pronounceable words, one token each, that fill the vocabulary."""
    consonants, vowels = "bdfgklmnprstvz", "aeiou"
    syllables = [c + v for c in consonants for v in vowels]
    found = [a + b + c for a in syllables for b in syllables for c in syllables[:7]]
    random.Random(0).shuffle(found)
    return found[: VOCABULARY - 100]


def make_encoder(folder: Path, shape: str) -> Path:
    """A BERT of `SHAPES[shape]` with random weights and a WordPiece vocabulary of 30,522; kept if it is there."""
    if (folder / "config.json").exists():
        return folder
    pieces = [*SPECIALS.values(), "[MASK]", "query", "passage", ":", *words()]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [(piece, vocabulary[piece]) for piece in ("[SEP]", "[CLS]")]
    tokenizer.post_processor = processors.BertProcessing(*ends)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=POSITIONS, **SPECIALS)
    torch.manual_seed(0)
    config = BertConfig(vocab_size=VOCABULARY, max_position_embeddings=POSITIONS, **SHAPES[shape])
    fast.save_pretrained(folder)
    BertModel(config).save_pretrained(folder)
    return folder


def make_queries(number: int, seed: int) -> list[str]:
    """Different queries of 10 to 20 tokens ("query", ":" and two special ones included)."""
    generator, vocabulary = random.Random(seed), words()
    found = {" ".join(generator.choices(vocabulary, k=generator.randint(6, 16))) for _ in range(2 * number)}
    return sorted(found)[:number]


class RandomPassages(SentenceEncoder):
    """The encoder with random unit vectors for passages: encoding half a million on a CPU takes hours."""

    def encode_passages(self, passages: list[str]) -> np.ndarray:
        generator = np.random.default_rng(zlib.crc32("".join(passages[:1]).encode()))
        vectors_N_D = generator.standard_normal((len(passages), self.dim), dtype=np.float32)
        return vectors_N_D / np.linalg.norm(vectors_N_D, axis=1, keepdims=True)


def make_index(folder: Path, encoder: Path, rows: int) -> Path:
    """An index of `rows` passages of 100 words; kept if it is there."""
    if (folder / "manifest.json").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    generator, vocabulary = random.Random(rows), words()
    corpus = folder.with_suffix(".jsonl")
    with open(corpus, "w", encoding="utf-8") as handle:
        for row in range(rows):
            start = generator.randrange(len(vocabulary) - PASSAGE_WORDS)
            text = " ".join(vocabulary[start : start + PASSAGE_WORDS])
            handle.write(json.dumps({"id": str(row), "contents": f"Article {row}\n{text}"}) + "\n")
    build_index(corpus, RandomPassages(encoder), folder)
    corpus.unlink()
    return folder
