"""The pseudo-answer that is scored after every context: a short template around the gold answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from verl_credit.config.keys import AUTO

ANSWER_TAG = "<answer>{answer}</answer>"
BOXED = "\\boxed{{answer}}"
TEMPLATES = {"tag": ANSWER_TAG, "boxed": BOXED}
"""The template for each form of a row (`turns/reward/qa.py`)."""
LONGEST_TAIL = 32


def auto_template(form: str | None, prompt: Callable[[], str]) -> str:
    """The template of ``auto``: of the row's ``form``, else the template that the text of ``prompt()`` requests."""
    if form is None:
        return BOXED if "\\boxed" in prompt() else ANSWER_TAG
    return TEMPLATES[form]


@dataclass(frozen=True)
class PseudoAnswer:
    """Token ids after a context, and the half-open span ``[gold_start, gold_end)`` of the gold answer among them."""

    token_ids: tuple[int, ...]
    gold_start: int
    gold_end: int


def pseudo_answer(tokenizer, gold: str, template: str = ANSWER_TAG, before: str = "") -> PseudoAnswer:
    """Tokenise the text ``before`` followed by ``template`` with ``gold``; the gold span is found by offsets.

    A token belongs to the gold span when its characters overlap the answer's, also when the tokenizer merges the
    answer's first or last character with the template's. Raises ValueError when the template lacks ``{answer}`` or the
    tokenizer cannot give offsets.
    """
    head, placeholder, rest = template.partition("{answer}")
    if not placeholder:
        raise ValueError(f"algorithm.info_gain_template is {template!r}: it must contain {{answer}}")
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError("information gain needs a fast tokenizer (character offsets); this one has none")
    text = before + head + gold + rest
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    start = len(before) + len(head)
    end = start + len(gold)
    inside = [i for i, (a, b) in enumerate(encoded["offset_mapping"]) if a < end and b > start and b > a]
    if not inside:
        raise ValueError(f"gold answer {gold!r} has no token in {text!r}")
    return PseudoAnswer(tuple(encoded["input_ids"]), inside[0], inside[-1] + 1)


class AnswerWriter:
    """Writes pseudo-answers in the policy's tokens, which may merge with the text before them.

    A context ends with the assistant header. From its last special token on (``<|im_start|>``), header and answer are
    tokenised together. If the result begins with the header's tokens, as nearly always, the answer is appended to them;
    otherwise they are replaced.
    ``header``: contexts after a turn end at its call, without the header; it is then written with the arguments of the
    rollouts' chat template (``data.apply_chat_template_kwargs``).
    """

    def __init__(
        self,
        tokenizer,
        template: str,
        *,
        prefix: str = "",
        header: bool = False,
        chat_template_kwargs: Mapping | None = None,
    ):
        self.tokenizer, self.template, self.prefix = tokenizer, template, prefix
        self.header = assistant_header(tokenizer, chat_template_kwargs) if header else []
        self._special = set(tokenizer.all_special_ids)

    def template_of(self, prompt_ids: tuple[int, ...], form: str | None = None) -> str:
        r"""The template for a row. ``auto`` takes the one of its form (``ground_truth.form``), as the reward does; without a
        form it takes ``\boxed{...}`` for a prompt that mentions it, else the answer tag."""
        if self.template != AUTO:
            return self.template
        return auto_template(form, lambda: self.tokenizer.decode(prompt_ids))

    def prefix_at(self, context_ids: Sequence[int], after_turn: bool) -> str:
        """The text between the context and the template. It is "" when the context, or the header after it, ends with the
        prefix: Qwen3's chat template writes the empty thought itself with enable_thinking=false."""
        if not self.prefix:
            return ""
        last = self.header if after_turn and self.header else context_ids[-len(self.prefix.encode()) :]
        return "" if self.tokenizer.decode(last).endswith(self.prefix) else self.prefix

    def tail(self, context_ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens after the context's last special token, if these are at most ``LONGEST_TAIL``; else ()."""
        for n, token in enumerate(reversed(context_ids[-LONGEST_TAIL - 1 :])):
            if token in self._special:
                return tuple(context_ids[len(context_ids) - n :])
        return ()

    def write(
        self, tail: tuple[int, ...], gold: str, template: str, after_turn: bool
    ) -> tuple[int, PseudoAnswer]:
        """(number of context tokens to replace, the answer after the rest). ``after_turn`` False: at the bare prompt."""
        header = self.header if after_turn else []
        last = self.tail(header) if header else tail
        before = self.tokenizer.decode(last) if last else ""
        if before and tuple(self.tokenizer(before, add_special_tokens=False)["input_ids"]) != tuple(last):
            # Tokenising the text would give other tokens. The context keeps its own; the answer starts a new token.
            last, before = (), ""
        joint = pseudo_answer(self.tokenizer, gold, template, before)
        n = len(last)
        if joint.token_ids[:n] == tuple(last) and joint.gold_start >= n:
            kept = tuple(header)
            answer = PseudoAnswer(joint.token_ids[n:], joint.gold_start - n, joint.gold_end - n)
            return 0, _after(kept, answer)
        kept = tuple(header[: len(header) - n]) if header else ()
        return (0 if header else n), _after(kept, joint)


def _after(ids: tuple[int, ...], answer: PseudoAnswer) -> PseudoAnswer:
    shift = len(ids)
    return PseudoAnswer(ids + answer.token_ids, answer.gold_start + shift, answer.gold_end + shift)


def assistant_header(tokenizer, chat_template_kwargs: Mapping | None = None) -> list[int]:
    """The chat template's tokens between the end of a turn and the policy's next one.

    Contexts that end at a tool call need them, because no observation with the header follows yet.
    """
    messages = [{"role": "user", "content": "x"}]
    options = {**(chat_template_kwargs or {}), "tokenize": False}
    with_header = tokenizer.apply_chat_template(messages, **options | {"add_generation_prompt": True})
    without = tokenizer.apply_chat_template(messages, **options | {"add_generation_prompt": False})
    if not with_header.startswith(without) or with_header == without:
        raise ValueError(f"the chat template of {tokenizer.name_or_path} has no generation prompt to append")
    newline = "\n" if without.endswith("\n") else ""
    return tokenizer(newline + with_header[len(without) :], add_special_tokens=False)["input_ids"]
