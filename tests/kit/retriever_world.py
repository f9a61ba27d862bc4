"""A tiny BERT encoder with random weights and a corpus, for tests of the retriever."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

WORDS = [
    "query",
    "passage",
    ":",
    "who",
    "is",
    "the",
    "mayor",
    "of",
    "in",
    "born",
    "town",
    "river",
    "bridge",
    "baker",
]
LETTERS = [chr(c) for c in range(ord("a"), ord("z") + 1)] + [str(d) for d in range(10)]


def make_encoder(folder: Path, seed: int = 0) -> Path:
    """A 2-layer BERT of 32 dimensions with a WordPiece vocabulary of words and letters."""
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*marks, *WORDS, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    specials = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **specials).save_pretrained(
        folder
    )
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    return folder


def make_corpus(file: Path, rows: int = 50) -> Path:
    """`rows` short articles with different titles."""
    with open(file, "w", encoding="utf-8") as handle:
        for row in range(rows):
            born = f"{'river' * (row % 4)} {row % 5}"
            contents = f"Town {row}\nThe mayor of town {row} is baker {row * 7 % 13}, born in {born}."
            handle.write(json.dumps({"id": f"doc-{row}", "contents": contents}) + "\n")
    return file
