"""What a chat template writes before the policy's turn, and then before an answer: an empty thought, a channel's mark."""

from __future__ import annotations

from collections.abc import Mapping

from verl_credit.turns.rollout.search.wire import SCHEMA
from verl_credit.turns.rollout.thoughts import FORMS, opened_by

QUESTION, ANSWER = "Where does the Nile end?", "In the sea."


def assistant_header(tokenizer, chat_template_kwargs: Mapping | None = None) -> list[int]:
    """The chat template's tokens between the end of a turn and the policy's next one; none where no text marks its turn, as
    in Mistral's template.

    Contexts that end at a tool call need them, because no observation with the header follows yet.
    """
    with_header = _written(tokenizer, chat_template_kwargs, header=True)
    without = _written(tokenizer, chat_template_kwargs, header=False)
    after = with_header.rpartition(QUESTION)[2]
    if not with_header.startswith(without) or after in ("", with_header):
        raise ValueError(f"the chat template of {tokenizer.name_or_path} has no generation prompt to append")
    newline = "\n" if without.endswith("\n") and with_header != without else ""
    return tokenizer(newline + with_header[len(without) :], add_special_tokens=False)["input_ids"]


def before_answer(tokenizer, chat_template_kwargs: Mapping | None = None) -> str:
    """The chat template's text between a question and the policy's turn."""
    return _written(tokenizer, chat_template_kwargs, header=True).rpartition(QUESTION)[2]


def answer_prefix(tokenizer, chat_template_kwargs: Mapping | None = None) -> str:
    """The text that has to follow the header so that an answer may: what the template writes there before a last answer
    without a thought.

    ``<think>\\n\\n</think>\\n\\n`` for Qwen3, ``\\n</think>\\n\\n`` where the header opens the thought, "" where it has
    closed it or where the model does not think, ``<|channel|>final<|message|>`` for gpt-oss. A template that writes another
    header in a longer conversation, and opens a thought in it: the closing mark.
    """
    header = _written(tokenizer, chat_template_kwargs, header=True)
    try:
        answered = _written(tokenizer, chat_template_kwargs, ANSWER).rpartition(ANSWER)[0]
    except Exception:  # a template may raise any exception
        answered = ""
    if answered.startswith(header):
        return answered[len(header) :]
    closing = FORMS.get(opened_by(header), "")
    return f"\n{closing}\n\n" if closing and header.endswith("\n") else closing


def _written(tokenizer, arguments: Mapping | None, answer: str | None = None, *, header: bool = False) -> str:
    """The question, or the question and its answer, with the search tool: some templates demand a list of tools."""
    answered = [] if answer is None else [{"role": "assistant", "content": answer}]
    messages = [{"role": "user", "content": QUESTION}, *answered]
    options = {**(arguments or {}), "tokenize": False, "add_generation_prompt": header}
    return tokenizer.apply_chat_template(messages, tools=[SCHEMA], **options)
