"""``MCPTool``: a tool of an MCP server as a tool of verl's, named in ``multi_turn.tool_config_path``."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pydantic import model_validator
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import (
    OpenAIFunctionParametersSchema,
    OpenAIFunctionPropertySchema,
    OpenAIFunctionSchema,
    OpenAIFunctionToolSchema,
    ToolResponse,
)

from verl_credit.errors import ConfigError
from verl_credit.host.compat import FAILED
from verl_credit.names import TOOL_FAULT
from verl_credit.turns.rollout.mcp import Refused, ToolSettings, ask
from verl_credit.turns.rollout.search.faults import SearchFault

MOST_ERROR_CHARS = 1000
DEEPEST = 32


class _Property(OpenAIFunctionPropertySchema, extra="allow"):
    """verl's class leaves out what a schema holds beside type, description and enum, and wants a type."""

    @model_validator(mode="before")
    @classmethod
    def _typed(cls, given: dict) -> dict:
        if "type" in given:
            return given
        choices = given.get("anyOf") or given.get("oneOf") or []
        types = [one["type"] for one in choices if isinstance(one.get("type"), str)]
        return {**given, "type": list(dict.fromkeys(types)) or "object"}


class _Parameters(OpenAIFunctionParametersSchema, extra="allow"):
    properties: dict[str, _Property]


class _Function(OpenAIFunctionSchema):
    parameters: _Parameters


class MCPToolSchema(OpenAIFunctionToolSchema):
    """The server's schema, whole."""

    function: _Function


class MCPTool(BaseTool):
    """A tool of a server. Every call has a session of its own, so that rows share no state.

    ``create_kwargs`` of the row (``extra_info.tools_kwargs``) go to the server as ``_meta.create_kwargs`` of the call, which
    the policy does not see. The reward is the number in ``_meta.reward`` of the result; without it there is none. An error
    that the tool reports and arguments that the server refuses are raised: verl shows them to the policy. A server that is
    gone, late or breaks the protocol is a fault of the row: it is masked out, as after a search that failed.
    """

    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema | None = None):
        # verl's BaseTool.__init__ prints the schema for every instance, therefore it is not called.
        self.config, self.settings = config, ToolSettings.read(config)
        if tool_schema is not None:
            raise ConfigError("tool_schema: the server has it; leave it out of the file")
        self.tool = _chosen(self.settings)
        self.name = self.settings.name or self.tool.name
        function = {"name": self.name, "description": self.tool.description or ""}
        function["parameters"] = {"type": "object", "properties": {}, **self.tool.input_schema}
        self.tool_schema = MCPToolSchema.model_validate({"type": "function", "function": function})
        self._rows: dict[str, dict] = {}

    async def create(self, instance_id: str | None = None, **kwargs) -> tuple[str, ToolResponse]:
        instance_id, response = await super().create(instance_id)
        self._rows[instance_id] = kwargs.get("create_kwargs") or {}
        return instance_id, response

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs):
        """Errors: ValueError for what the policy did wrongly."""
        row, given = self._rows.get(instance_id), sendable(parameters)
        meta = {"create_kwargs": row} if row else None
        try:
            result = await ask(
                self.settings, lambda client: client.call_tool(self.tool.name, given, meta=meta)
            )
        except Refused as refused:
            raise ValueError(str(refused)[:MOST_ERROR_CHARS]) from refused
        except SearchFault as fault:
            return ToolResponse(text=f"{FAILED} '{self.name}': {fault.code}"), None, {TOOL_FAULT: fault}
        text = _text_of(result)
        if result.is_error:
            raise ValueError(text[:MOST_ERROR_CHARS])
        return ToolResponse(text=text[: self.settings.max_chars]), (result.meta or {}).get("reward"), {}

    async def release(self, instance_id: str, **kwargs) -> None:
        self._rows.pop(instance_id, None)


def sendable(parameters: Any) -> dict:
    """The policy's arguments without lone surrogates. Raises ValueError for what is no object, what JSON cannot hold, and
    for deep nesting, which parsers refuse: a server that cannot read a call would be taken for one that failed."""
    if not isinstance(parameters, dict):
        raise ValueError("arguments: expected an object")
    if _depth(parameters) > DEEPEST:
        raise ValueError(f"arguments are nested more than {DEEPEST} deep")
    written = json.dumps(parameters, ensure_ascii=False, allow_nan=False)
    return json.loads(written.encode("utf-8", "replace"))


def _depth(value: Any) -> int:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inside is None else 1 + max(map(_depth, inside), default=0)


def _chosen(settings: ToolSettings):
    """The server's tool. Raises ConfigError where it has none of the name, or several and no name is given; SearchFault."""
    # verl makes tools in and outside of an event loop.
    with ThreadPoolExecutor(1) as thread:
        tools = thread.submit(asyncio.run, ask(settings, _tools)).result()
    if settings.tool is None and len(tools) == 1:
        return next(iter(tools.values()))
    if settings.tool not in tools:
        raise ConfigError(key="config.tool", value=settings.tool, accepted=sorted(tools))
    return tools[settings.tool]


async def _tools(client) -> dict:
    """The server's tools by name; a list may have several pages."""
    page = await client.list_tools()
    tools = list(page.tools)
    while page.next_cursor is not None:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return {tool.name: tool for tool in tools}


def _text_of(result) -> str:
    """The result's text. What is no text is named in it."""
    texts = [(block, getattr(getattr(block, "resource", block), "text", None)) for block in result.content]
    return "\n".join(text if isinstance(text, str) else f"[{block.type}: left out]" for block, text in texts)
