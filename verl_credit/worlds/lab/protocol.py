"""The text of turns, tool calls and observations (Qwen3 / Hermes form), the strategic grams of a thought, and the tokenizer:
a byte-level BPE in Qwen3's format in which every name, tag and word of the lab is one token."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from verl_credit.worlds.lab.encyclopedia import FILLER, RELATIONS, World

CALL_HEAD = '{"name": "search", "arguments": {"query": "'
CALL_TAIL = '"}}'
PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# The template deliberately omits the tools: the lab's policy learns its one tool from demonstrations, and a schema
# would be several times as long as the question.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
{{ '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{ '<|im_end|>\\n' }}{%- endif -%}
{%- else -%}
{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{%- if message.content or not loop.first -%}{{ '\\n' }}{%- endif -%}
{{ '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
{%- if function.arguments is string -%}{{ function.arguments }}
{%- else -%}{{ function.arguments | tojson }}{%- endif -%}
{{ '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

# The phrases that mark planning in a thought, in five categories.
GRAMS = {
    "hesitation": ("wait let me", "let me think", "on second thought"),
    "verification": ("let me check", "let me verify", "is this right", "double check"),
    "backtracking": (
        "try another approach",
        "go back and",
        "start over",
        "that's not right",
        "that doesn't work",
    ),
    "alternatives": ("another way to", "or we could", "what if we"),
    "insight": ("notice that", "the key is", "the key insight"),
}
# These grams continue with the word "search".
_OPEN = {"wait let me", "go back and", "another way to", "or we could", "what if we"}

_CALL = re.compile(r"<tool_call>\n?(.*?)\n?</tool_call>", re.DOTALL)


def prompt_text(question: str) -> str:
    """Renders a user message as the chat template does, up to the policy's first turn."""
    return f"<|im_start|>user\n{question}{TURN_END}\n<|im_start|>assistant\n"


def search_turn(query: str, thought: str = "") -> str:
    """A policy turn that searches, with ``thought`` in a think tag unless it is empty."""
    return f"{_think(thought)}<tool_call>\n{CALL_HEAD}{query}{CALL_TAIL}\n</tool_call>{TURN_END}"


def answer_turn(answer: str, thought: str = "") -> str:
    """The policy turn that ends the trajectory."""
    return f"{_think(thought)}<answer>{answer}</answer>{TURN_END}"


def pages(contents: Iterable[str]) -> str:
    """The tool's text for a result list: numbered pages."""
    return "\n".join(f"Page {i}: {text}" for i, text in enumerate(contents, 1))


def observation_text(tool_content: str) -> str:
    """The text between the policy's end-of-turn token and its next turn."""
    return (
        f"\n<|im_start|>user\n<tool_response>\n{tool_content}\n</tool_response>{TURN_END}\n"
        "<|im_start|>assistant\n"
    )


def parse_query(turn: str) -> str | None:
    """The query of the turn's first well-formed search call; None when there is none."""
    for body in _CALL.findall(turn):
        try:
            call = json.loads(body)
            query = call["arguments"]["query"] if call["name"] == "search" else None
        except (ValueError, KeyError, TypeError):
            continue
        if isinstance(query, str) and query.strip():
            return query
    return None


def _think(thought: str) -> str:
    return f"<think>{thought}</think>\n" if thought else ""


def phrase(gram: str) -> str:
    """The gram as written in a thought; the leading space makes each word one token."""
    return f" {gram} search" if gram in _OPEN else f" {gram}"


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
