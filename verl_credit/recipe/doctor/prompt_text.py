"""Checks of what the chat template writes around a run's texts: the text before a scored answer, and the date in a prompt.

Both are decided here, where the tokenizer is at hand, and `train` writes them into the run's configuration, so that every
worker, its files and a resume have one value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime

from verl_credit.config.keys import AUTO
from verl_credit.errors import PreflightError
from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.data import TRAIN
from verl_credit.recipe.doctor.lengths import PromptMeter
from verl_credit.recipe.doctor.result import Result, passed, skipped, warned
from verl_credit.turns.header import answer_prefix, before_answer
from verl_credit.turns.requests import ANSWER_TAG, AnswerWriter
from verl_credit.turns.thoughts import without_thoughts

PREFIX, DATE = "algorithm.info_gain_prefix", "prompt_date"
ARGUMENTS = "+data.apply_chat_template_kwargs"


def check_prefix(context: Context) -> Result:
    """Decides ``info_gain_prefix=auto``, and says what precedes a scored answer, which may be inside a thought."""
    settings = context.settings
    if not settings.scores_gain:
        return skipped("no gold answer is scored")
    given, arguments = settings.algorithm.info_gain_prefix, settings.chat_template_kwargs
    try:
        writer = AnswerWriter(context.tokenizer, settings)
        header, expected = (
            before_answer(context.tokenizer, arguments),
            answer_prefix(context.tokenizer, arguments),
        )
    except Exception as error:  # a template may raise any exception
        raise PreflightError(f"the chat template cannot write an answer: {error}") from error
    context.answer_prefix = writer.prefix
    ids = context.tokenizer(header, add_special_tokens=False)["input_ids"]
    before = header + writer.prefix_at(ids, after_turn=False)
    template = ANSWER_TAG if writer.template == AUTO else writer.template
    shown = f"a gold answer is scored as {before + template!r} after a question ({PREFIX}={given!r})"
    other = given != AUTO and expected.strip() and before != header + expected
    if not (other or _in_thought(before + template)):
        return passed(shown)
    return warned(
        f"{shown}; the chat template itself writes {header + expected!r} before an answer: {PREFIX}=auto takes that text"
    )


def _in_thought(text: str) -> bool:
    """The answer in this text is a part of a thought."""
    return "{answer}" not in without_thoughts(text)


TODAY, GIVEN = "@today@", "@given@"
_NAMES = re.compile(r"\b[A-Za-z_]*(?:date|day|time|now)[A-Za-z_]*\b")


def check_date(context: Context) -> Result:
    """A template that writes today's date gives other prompts to a run that is resumed on another day."""
    meter, prompt = PromptMeter(context.tokenizer, context.config), context.rows(TRAIN)[0].prompt
    text, forms = _dated(meter, prompt, {})
    today = ", ".join(dict.fromkeys(datetime.now().strftime(form) for form in forms))
    today = today if TODAY in text else ""
    if not today:
        return passed("the chat template writes no date into the prompts")
    context.prompt_date = today
    says = f"the chat template writes today's date ({today!r}) into the prompts: a run that is resumed on another day has "
    says += "other prompts, and its start says so. "
    if (before := context.value(DATE)) not in (None, today):
        says += f"They had {before!r} ({DATE}) in the run of this configuration. "
    if name := next((name for name in _names(meter) if _fixes(meter, prompt, name)), None):
        return warned(f"{says}{ARGUMENTS}.{name}={today!r} keeps the date")
    return warned(
        f"{says}No argument of the template keeps it; a system message in the rows may replace the template's own, or give "
        "a template without a date with actor_rollout_ref.model.custom_chat_template"
    )


def _names(meter: PromptMeter) -> list[str]:
    """The template's names that a date may have; its function is none of them."""
    names = dict.fromkeys(_NAMES.findall(str(meter.tokenizer.chat_template)))
    return [name for name in names if name != "strftime_now"]


def _fixes(meter: PromptMeter, prompt: list[dict], name: str) -> bool:
    text, _ = _dated(meter, prompt, {name: GIVEN})
    return TODAY not in text and GIVEN in text


def _dated(meter: PromptMeter, prompt: list[dict], arguments: Mapping) -> tuple[str, list[str]]:
    """(the prompt with a mark in place of today's date, the formats of the dates)."""
    forms: list[str] = []

    def strftime_now(form: str) -> str:
        forms.append(form)
        return TODAY

    options = {**meter.kwargs, **arguments, "strftime_now": strftime_now}
    text = meter.tokenizer.apply_chat_template(
        prompt, tools=meter.tools, **options, tokenize=False, add_generation_prompt=True
    )
    return text, forms
