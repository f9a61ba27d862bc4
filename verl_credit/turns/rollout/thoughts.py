"""What a policy only thinks: text between the marks of a thought, in which no call and no answer counts.

The agent loops, the reward and the rollouts in one process read a turn through `without_thoughts`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

FORMS = {
    "<think>": "</think>",  # Qwen, DeepSeek, GLM, MiniMax, Kimi K2
    "<seed:think>": "</seed:think>",  # Seed-OSS
    "[THINK]": "[/THINK]",  # Magistral
    "◁think▷": "◁/think▷",  # Kimi-VL
    "<|channel>thought\n": "<channel|>",  # Gemma 4
    "<|channel|>analysis<|message|>": "<|end|>",  # gpt-oss
}
"""The marks of a thought by their model families: opening, closing."""

# Other channels of gpt-oss end with <|end|>, too, and so does every turn of other models.
_ALONE = set(FORMS.values()) - {"<|end|>"}
_MARKS = re.compile("|".join(map(re.escape, [*FORMS, *FORMS.values()])))
_TAIL = 40  # tokens of a prompt in which the opening mark of its last thought stands, one byte each at worst


def without_thoughts(text: str, opened: str = "") -> str:
    """The text without its thoughts. ``opened``: the mark with which the prompt opened one (`opened_by`).

    A thought reaches from an opening mark to the next closing mark of its form; further opening marks in it are text. It
    reaches to the end where none closes it. Before a closing mark that nothing opened, everything since the last thought,
    or since the beginning, is a thought: a chat template may open it, and a policy may mention the mark in its thought.
    The time is linear in the text's length.
    """
    text = opened + text
    kept, place, awaited = [], 0, None
    for mark in _MARKS.finditer(text):
        if awaited is None and mark[0] in FORMS:
            kept.append(text[place : mark.start()])
            awaited = FORMS[mark[0]]
        elif mark[0] == awaited or (awaited is None and mark[0] in _ALONE):
            place, awaited = mark.end(), None
    if awaited is None:
        kept.append(text[place:])
    return "".join(kept)


def opened_by(prompt: str) -> str:
    """The mark with which the prompt ends, so that the turn after it begins inside a thought; "" where it does not."""
    end = prompt.rstrip()
    return next((mark for mark in FORMS if end.endswith(mark.rstrip())), "")


class TurnReader:
    """A tokenizer that decodes a turn as it counts. verl's tool parsers get token ids and decode them with it.

    ``include_reasoning``: thoughts count.
    """

    def __init__(self, tokenizer, include_reasoning: bool = False):
        self._tokenizer, self._included, self._opened = tokenizer, include_reasoning, ""

    def __getattr__(self, name: str):
        return getattr(self._tokenizer, name)

    def after(self, prompt_ids: Sequence[int]) -> TurnReader:
        """Sets the tokens before the turn that is decoded next."""
        self._opened = opened_by(self._tokenizer.decode(prompt_ids[-_TAIL:]))
        return self

    def decode(self, ids: Sequence[int], *args, **kwargs) -> str:
        text = self._tokenizer.decode(ids, *args, **kwargs)
        return text if self._included else without_thoughts(text, self._opened)

    def plain(self, ids: Sequence[int]) -> str:
        """The text without special tokens, some of which mark thoughts."""
        text = self.decode(ids)
        if text == self._tokenizer.decode(ids):
            return self._tokenizer.decode(ids, skip_special_tokens=True)
        added = self._tokenizer.added_tokens_decoder.values()
        for special in {token.content for token in added if token.special}:
            text = text.replace(special, "")
        return text
