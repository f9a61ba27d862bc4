"""A byte-level BPE in Qwen3's format in which every name, tag and word of the lab is one token."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from verl_credit.worlds.lab.protocol import CALL_HEAD, CALL_TAIL, CHAT_TEMPLATE, GRAMS
from verl_credit.worlds.lab.world import FILLER, RELATIONS, World

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TAGS = tuple(
    f"<{end}{name}>" for name in ("think", "answer", "tool_call", "tool_response") for end in ("", "/")
)
# The tokenizer's pattern splits these at the apostrophe.
_APOSTROPHES = (" that's", " doesn't")


def make_tokenizer(
    names: Iterable[str], *, pieces: Iterable[str] = (CALL_HEAD, CALL_TAIL), merges: int = 350
) -> PreTrainedTokenizerFast:
    """The tokenizer of a world; every name N is the single token " N", and so is every text of ``pieces`` as it stands.

    Raises ValueError when a word of the lab's templates is more than one token (``merges`` too small).
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = template_words()
    core.train_from_iterator(
        [text for word in words for text in (word, " " + word)],
        trainers.BpeTrainer(
            vocab_size=len(alphabet) + merges, initial_alphabet=alphabet, show_progress=False
        ),
    )
    core.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in (PAD, TURN_START, TURN_END)]
    )
    plain = [*TAGS, *pieces, *_APOSTROPHES, *(f" {name}" for name in names)]
    core.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=TURN_END, model_max_length=1024,
        model_input_names=["input_ids", "attention_mask"], clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = CHAT_TEMPLATE
    split = [w for w in words if len(tokenizer.encode(" " + w, add_special_tokens=False)) != 1]
    if split:
        raise ValueError(f"merges={merges} leaves {split[:5]} in pieces; use a larger value")
    return tokenizer


def template_words() -> list[str]:
    """Every word of the lab's questions, articles and thoughts, except names."""
    words = {"What", "is", "the", "of", "A", "a", "With", "with", "Page", "1", "2", "3", "4"}
    words |= {"search", "user", "assistant", "system", "tool", "query", "passage"}
    words |= {"name", "arguments", "answer", "Answer"}
    words |= {*FILLER, *RELATIONS}
    words |= {relation for relations in RELATIONS.values() for relation in relations}
    words |= {word for grams in GRAMS.values() for gram in grams for word in gram.split() if "'" not in word}
    return sorted(words)


def name_groups(tokenizer: PreTrainedTokenizerFast, world: World) -> list[list[int]]:
    """Token ids of the names, one list per kind of entity."""
    return [
        [tokenizer.convert_tokens_to_ids(f" {name}") for name in world.names(kind=kind)] for kind in RELATIONS
    ]
