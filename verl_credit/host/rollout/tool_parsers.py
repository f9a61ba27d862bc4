"""Parsers of tool calls for the formats that verl 0.9.1 does not read, in verl's registry: ``multi_turn.format=NAME``."""

from __future__ import annotations

import asyncio

from verl.experimental.agent_loop.tool_parser import FunctionCall, GptOssToolParser, ToolParser

from verl_credit.turns.rollout.tool_calls import READERS


class TextParser(ToolParser):
    """Reads a turn's text by the format's reader (`verl_credit.turns.rollout.tool_calls`)."""

    form: str
    stops: tuple[str, ...] = ()
    """Special tokens that end a turn with a call."""

    @property
    def stop_token_ids(self) -> list[int]:
        ids = [self.tokenizer.convert_tokens_to_ids(token) for token in self.stops]
        return [id for id in ids if id not in (None, self.tokenizer.unk_token_id)]

    async def extract_tool_calls(self, responses_ids, tools=None) -> tuple[str, list[FunctionCall]]:
        text = await asyncio.get_running_loop().run_in_executor(None, self.tokenizer.decode, responses_ids)
        turn = READERS[self.form](text)
        calls = [FunctionCall(name=c.name, arguments=c.arguments, tool_call_id=c.id) for c in turn.calls]
        return (turn.content if calls else text), calls


@ToolParser.register("mistral")
class MistralParser(TextParser):
    form = "mistral"


@ToolParser.register("harmony")
class HarmonyParser(GptOssToolParser):
    """gpt-oss. verl's own ``gpt-oss`` reads a call only after a thought in the same turn, and not as the model's template
    writes it (``to=functions.NAME<|channel|>commentary json``)."""

    def __init__(self, tokenizer) -> None:
        super().__init__(tokenizer)
        self.tool_call_pattern = (
            r"(?s)to=functions\.([^\s<]+)(?:<\|channel\|>commentary)?\s*(?:<\|constrain\|>)?(?:json)?\s*<\|message\|>"
            r"(.*?)<\|call\|>"
        )


# It comes last: it also reads the objects in a list of Mistral's.
@ToolParser.register("llama3")
class Llama3Parser(TextParser):
    form, stops = "llama3", ("<|eom_id|>",)
