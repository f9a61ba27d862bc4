"""The pseudo-answer that is scored behind every context: a short template around the gold answer."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_TEMPLATE = "<answer>{answer}</answer>"


@dataclass(frozen=True)
class PseudoAnswer:
    """Token ids of the filled template and the half-open span ``[gold_start, gold_end)`` of the gold answer."""

    token_ids: tuple[int, ...]
    gold_start: int
    gold_end: int


def pseudo_answer(tokenizer, gold: str, template: str = DEFAULT_TEMPLATE) -> PseudoAnswer:
    """Tokenise ``template`` filled with ``gold``; the gold span is found by character offsets.

    A token belongs to the gold span when its characters overlap the answer's: where the tokenizer merges
    the answer's first or last character with the template's, the merged token is counted as gold.
    Raises ValueError when the template lacks ``{answer}`` or the tokenizer cannot give offsets.
    """
    before, found, after = template.partition("{answer}")
    if not found:
        raise ValueError(f"algorithm.info_gain_template is {template!r}: it must contain {{answer}}")
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError("information gain needs a fast tokenizer (character offsets); this one has none")
    text = before + gold + after
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    start, end = len(before), len(before) + len(gold)
    inside = [i for i, (a, b) in enumerate(encoded["offset_mapping"]) if a < end and b > start and b > a]
    if not inside:
        raise ValueError(f"gold answer {gold!r} has no token of its own in {text!r}")
    return PseudoAnswer(tuple(encoded["input_ids"]), inside[0], inside[-1] + 1)


def assistant_header(tokenizer) -> list[int]:
    """Tokens between the end of a turn and the policy's next one, as the chat template writes them.

    Needed for contexts that end at a tool call, where no observation has brought the header yet.
    """
    messages = [{"role": "user", "content": "x"}]
    with_header = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    without = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
    if not with_header.startswith(without) or with_header == without:
        raise ValueError(f"the chat template of {tokenizer.name_or_path} has no generation prompt to append")
    newline = "\n" if without.endswith("\n") else ""
    return tokenizer(newline + with_header[len(without) :], add_special_tokens=False)["input_ids"]
