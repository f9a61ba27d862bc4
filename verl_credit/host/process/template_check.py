"""Checks before Ray starts that the model's chat template writes tools, calls and results as the agent loop reads them."""

from __future__ import annotations

import asyncio
import json
import logging

from omegaconf import DictConfig

from verl_credit.errors import PreflightError
from verl_credit.host.process.verl_checks import line_of, tool_schemas

RESULT = "The river Nile ends in the sea."
QUERY = "mouth of the river Nile"
_FUNCTION = {"name": "search", "arguments": {"query": QUERY}}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": _FUNCTION}]}
QUESTION = [{"role": "user", "content": "Where does the Nile end?"}]


def check_template(config: DictConfig, meter) -> str:
    """Check that the chat template writes the tools and their results; returns what it writes, "" without a tool.

    verl's own builder writes the tool responses here, as in the agent loop, therefore what it cannot write is refused, too.
    ``meter`` is the `PromptMeter` of the run's tokenizer. Raises PreflightError that names the model and what is left out.
    """
    tools, call = "the search tool", "a search"
    if not config.search.max_searches:
        tools, call = "the recipe's tools", "a tool"
        meter.tools = tool_schemas(config)
    if not meter.tools:
        return ""
    model, own = config.actor_rollout_ref.model, "actor_rollout_ref.model.custom_chat_template"
    given = own if model.get("custom_chat_template") else model.path
    named = f"actor_rollout_ref.model.path={model.path}: the chat template ({given})"
    try:
        writes_tools = meter.text(QUESTION) != meter.text(QUESTION, with_tools=False)
    except Exception as error:  # a template may raise any exception
        raise PreflightError(f"{named} cannot write a question: {line_of(error)[:300]}") from error
    if config.search.require_schema and not writes_tools:
        raise PreflightError(
            f"{named} writes the same text with and without {tools}, so that the policy sees no tool; take a "
            f"model whose template writes tools, give one with {own}, or, where the policy or its prompts know how to call, "
            "set search.require_schema=false"
        )
    try:
        observation = _observation(config, meter)
    except Exception as error:
        raise PreflightError(
            f"{named} cannot write what {call} returns (a message of the role tool after a call): {line_of(error)[:300]}"
        ) from error
    if RESULT not in observation:
        raise PreflightError(
            f"{named} leaves out what {call} returns (a message of the role tool after a call), which it wrote as "
            f"{observation[:200]!r}; take a model whose template shows tool responses, or give one with {own}"
        )
    if lost := _unread_call(config, meter):
        raise PreflightError(f"{named} {lost}")
    return f"{tools} and what {call} returns"


def _unread_call(config: DictConfig, meter) -> str:
    """What is wrong with the template's form of a call for the run's parser; "" where the parser reads it.

    A template that writes no call at all is not judged: the policy learned the form elsewhere.
    """
    from verl.experimental.agent_loop.tool_parser import ToolParser

    wanted = config.actor_rollout_ref.rollout.multi_turn.format
    try:
        text = meter.text([*QUESTION, CALL, {"role": "tool", "content": RESULT}])
    except Exception as error:
        return f"cannot write a dialogue with a call and what it returns: {line_of(error)[:300]}"
    if QUERY not in text or wanted not in ToolParser._registry:  # `check_names` refuses an unknown one
        return ""
    ids = meter.tokenizer.encode(text, add_special_tokens=False)
    reading = [
        name
        for name in ToolParser._registry
        if _reads(ToolParser.get_tool_parser, name, meter.tokenizer, ids)
    ]
    if wanted in reading:
        return ""
    place = text.rindex(QUERY)
    known = f"set it to {' or '.join(reading)}" if reading else "no parser that verl has reads it"
    return (
        f"writes a call as {text[max(place - 60, 0) : place + len(QUERY) + 30]!r}, which "
        f"actor_rollout_ref.rollout.multi_turn.format={wanted} does not read, so that every call would be lost: {known}"
    )


def _reads(parser, name: str, tokenizer, ids: list[int]) -> bool:
    """Does the parser find the call?"""
    logging.disable(logging.CRITICAL)  # parsers log what they cannot read
    try:
        _, calls = asyncio.run(parser(name, tokenizer).extract_tool_calls(ids))
        return any((call.name, json.loads(call.arguments)) == ("search", {"query": QUERY}) for call in calls)
    except Exception:  # a parser for other tokenizers, or the user's
        return False
    finally:
        logging.disable(logging.NOTSET)


def _observation(config: DictConfig, meter) -> str:
    """The text that the agent loop would append after a call."""
    from verl_credit.host.process.stream_check import loop_builder

    before, builder = [*QUESTION, CALL], loop_builder(config, meter)
    after = [*before, {"role": "tool", "content": RESULT}]
    ids = builder.tokenize_context_incremental_messages(before, after, tools=meter.tools)
    return meter.tokenizer.decode(ids)
