"""How a chat template writes a call, which registered parsers read it, and what ``auto`` therefore is."""

from __future__ import annotations

import asyncio
import json
import logging
from functools import cached_property

from omegaconf import DictConfig, OmegaConf

from verl_credit.config.keys import AUTO
from verl_credit.host.process.verl_checks import line_of
from verl_credit.recipe.agent_loops import AT_ONCE, FORMAT
from verl_credit.turns.rollout.search.wire import SCHEMA
from verl_credit.turns.rollout.tool_calls import NO_TOOL, PARALLEL_CALLS

QUESTION = [{"role": "user", "content": "Where does the Nile end?"}]
QUERY = "mouth of the river Nile"
RESULTS = ("The river Nile ends in the sea.", "The delta of the Nile lies in Egypt.")
IDS = ("search000", "search001")
"""Mistral's templates demand ids of nine letters or digits, and Kimi's write the id in place of the name."""
FAMILIES = {"gpt_oss": ("harmony", "gpt-oss"), "smollm3": ("hermes",)}
"""By ``model_type``: the formats of models whose template writes no call, or (gpt-oss) one that verl does not read."""


class CallForm:
    """A template's form of a call of the search tool; a tool of the recipe's own is called in the same form."""

    def __init__(self, meter):
        self.meter, self.family, self.error = meter, FAMILIES.get(meter.model_type, ()), ""
        """Why the template cannot write a dialogue with a call; "" where it can."""

    @cached_property
    def text(self) -> str:
        """The turn with the call and its result as the template writes them; "" where it leaves the call out."""
        try:
            header = self.meter.text(QUESTION)
            whole = self.meter.text([*QUESTION, *_messages(1, ids=True)])
        except Exception as error:  # a template may raise any exception
            self.error = line_of(error)[:300]
            return ""
        return whole.removeprefix(header) if QUERY in whole else ""

    @cached_property
    def readers(self) -> dict[str, bool]:
        """The registered parsers that read the call, by name: do they give calls an id?"""
        from verl.experimental.agent_loop.tool_parser import ToolParser

        from verl_credit.host.rollout import tool_parsers  # noqa: F401  (the import registers ours)

        if not self.text:
            return {}
        ids = self.meter.tokenizer.encode(self.text, add_special_tokens=False)
        found = {name: _read(ToolParser, name, self.meter.tokenizer, ids) for name in ToolParser._registry}
        return {name: call.tool_call_id is not None for name, call in found.items() if call}

    @property
    def chosen(self) -> str | None:
        """``auto``: the first parser that reads the template's call, else the family's."""
        return next(iter((*self.readers, *self.family)), None)

    def reads(self, name: str) -> bool:
        """Does this parser read the calls? A template that writes none is not judged: the policy learned them elsewhere."""
        return not self.text or name in (*self.readers, *self.family)

    def messages(self, n: int, name: str) -> tuple[list[dict], list[dict]]:
        """A dialogue before and after the results of ``n`` calls, as the agent loop has it with this parser."""
        call, *results = _messages(n, ids=self.readers.get(name, False))
        return [*QUESTION, call], [*QUESTION, call, *results]

    def excerpt(self) -> str:
        place = self.text.rindex(QUERY)
        return repr(self.text[max(place - 60, 0) : place + len(QUERY) + 30])


def settle(config: DictConfig, name: str = NO_TOOL, *, at_once: int = PARALLEL_CALLS) -> str:
    """Replaces ``auto`` of the format and of the calls at once by these values. Returns the keys that it decided, for the
    user, with their values."""
    decided = []
    for key, value in ((FORMAT, name), (AT_ONCE, at_once)):
        if OmegaConf.select(config, key) == AUTO:
            OmegaConf.update(config, key, value)
            decided.append(f"{key.removeprefix('actor_rollout_ref.rollout.')}={value}")
    return ", ".join(decided)


def _messages(n: int, *, ids: bool) -> list[dict]:
    """A message with ``n`` calls, and their results."""
    function = {"name": SCHEMA["function"]["name"], "arguments": {"query": QUERY}}
    calls, results = [], []
    for id, text in zip(IDS[:n], RESULTS[:n], strict=True):
        calls.append({"type": "function", "function": function} | ({"id": id} if ids else {}))
        results.append({"role": "tool", "content": text} | ({"tool_call_id": id} if ids else {}))
    return [{"role": "assistant", "content": "", "tool_calls": calls}, *results]


def _read(parsers, name: str, tokenizer, ids: list[int]):
    """The search that the parser finds; None where it finds none."""
    from verl.tools.schemas import OpenAIFunctionToolSchema

    tools = [OpenAIFunctionToolSchema.model_validate(SCHEMA)]
    logging.disable(logging.CRITICAL)  # parsers log what they cannot read
    try:
        _, calls = asyncio.run(parsers.get_tool_parser(name, tokenizer).extract_tool_calls(ids, tools))
        return next(c for c in calls if (c.name, json.loads(c.arguments)) == ("search", {"query": QUERY}))
    except Exception:  # no such call, a parser for other tokenizers, or the user's
        return None
    finally:
        logging.disable(logging.NOTSET)
