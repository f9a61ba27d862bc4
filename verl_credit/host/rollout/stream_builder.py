"""The tokens between a turn's end and what follows it, as the chat template writes them.

verl appends the template's text of a tool's answer to the policy's tokens, which stop at the token that ends the turn
(``<|im_end|>``). A template may write more after that token (ChatML: a newline). verl's builder inserts it for the model
types that its table has (Qwen, MiniMax) and leaves it out for every other one, so that a Llama or a SmolLM with ChatML would
train on ``<|im_end|><|im_start|>``, which it has never read. Here the template itself says what is inserted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache

from verl.utils.tokenizer.continuous_token import (
    ContinuousTokenBuilder,
    MergeResult,
    MiniMaxContinuousTokenBuilder,
    QwenContinuousTokenBuilder,
)

from verl_credit.host.compat import MERGE_TOKENS
from verl_credit.turns.rollout.search.wire import SCHEMA

_SEPARATING = {
    getattr(builder, MERGE_TOKENS)
    for builder in (ContinuousTokenBuilder, QwenContinuousTokenBuilder, MiniMaxContinuousTokenBuilder)
}
"""verl's merges that insert a newline or nothing. Those of other families (GLM, Gemma, DeepSeek) have rules of their own."""


def follow_template(builder: ContinuousTokenBuilder) -> ContinuousTokenBuilder:
    """Makes verl's builder insert what the template writes between the end of a turn and the next message, with mask 0.

    The template is measured at the first merge. A turn that was cut at its budget did not end: nothing follows it.
    """
    verls, measured = getattr(builder, MERGE_TOKENS), cache(turn_end)

    def merge(runtime_ids: list[int], appended_ids: list[int], **messages) -> MergeResult:
        if (found := measured(builder)) is None:
            return verls(runtime_ids, appended_ids, **messages)
        end, separator = found
        inserted = separator if list(runtime_ids[-1:]) == [end] else []
        return MergeResult(
            token_ids=[*runtime_ids, *inserted, *appended_ids],
            appended_token_count=len(appended_ids),
            inserted_token_ids=list(inserted),
        )

    if getattr(type(builder), MERGE_TOKENS) in _SEPARATING:
        setattr(builder, MERGE_TOKENS, merge)
    return builder


_shared: dict[tuple, ContinuousTokenBuilder] = {}
MOST_DIALOGUES = 64


def shared_builder(builder: ContinuousTokenBuilder) -> ContinuousTokenBuilder:
    """The builder of this process that writes what ``builder`` would, and that follows the template.

    verl makes one for every rollout, but what one rollout measured holds for all: how a turn ends, and the tokens of
    a dialogue that is rendered again (the prompt of a group; what verl puts before each observation). Builders of
    pictures stay as verl makes them.
    """
    if builder.supports_multimodal():
        return follow_template(builder)
    tokenizer = builder.tokenizer
    settings = repr({name: value for name, value in vars(builder).items() if value is not tokenizer})
    key = (type(builder), id(tokenizer), tokenizer.chat_template, settings)
    if key not in _shared:
        builder._render_tokens = _remembered(builder._render_tokens)
        _shared[key] = follow_template(builder)
    return _shared[key]


def _remembered(render: Callable[..., list[int]]) -> Callable[..., list[int]]:
    known: dict[str, list[int]] = {}

    def rendered(messages: list[dict], **asked) -> list[int]:
        try:
            key = json.dumps([messages, asked])
        except TypeError:  # a message that holds more than text
            return render(messages, **asked)
        tokens = known.get(key)
        if tokens is None:
            tokens = render(messages, **asked)
            if len(known) >= MOST_DIALOGUES:
                known.clear()
            known[key] = tokens
        return list(tokens)

    return rendered


def turn_end(builder: ContinuousTokenBuilder) -> tuple[int, list[int]] | None:
    """(the token that ends a turn, the tokens that the template writes between it and the next message).

    Two turns with a call that differ in text and call end alike: the last special token of that common end is the turn's.
    Where the template cannot write a call, two turns of text alone show it. None where the turn ends with no special token.
    """
    return _end_of(builder, _called, [SCHEMA]) or _end_of(
        builder, lambda text: _called(text, calls=False), None
    )


def _end_of(
    builder: ContinuousTokenBuilder, dialogue: Callable[[str], list[dict]], tools: list[dict] | None
) -> tuple[int, list[int]] | None:
    tokenizer = builder.tokenizer
    special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= set(tokenizer.all_special_ids)
    try:
        one, other = (
            builder._render_tokens(dialogue(query), add_generation_prompt=False, tools=tools)[::-1]
            for query in ("1", "two")
        )
    except Exception:  # a template may raise any exception; the checks before the start name it
        return None
    shared = one[: common_start(one, other)]
    if shared == one:  # the template leaves the turn out
        return None
    place = next((place for place, token in enumerate(shared) if token in special), None)
    return None if place is None else (shared[place], shared[:place][::-1])


def common_start(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of tokens with which both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def _called(query: str, *, calls: bool = True) -> list[dict]:
    function = {"name": SCHEMA["function"]["name"], "arguments": {"query": query}}
    called = {"tool_calls": [{"type": "function", "function": function}]} if calls else {}
    return [{"role": "user", "content": "x"}, {"role": "assistant", "content": query, **called}]
