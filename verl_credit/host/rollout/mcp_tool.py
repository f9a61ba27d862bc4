"""``MCPTool``: a tool of an MCP server as a tool of verl's, named in ``multi_turn.tool_config_path``."""

from __future__ import annotations

import json
import math
from typing import Any

from pydantic import ConfigDict, Field, model_validator
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import (
    OpenAIFunctionParametersSchema,
    OpenAIFunctionPropertySchema,
    OpenAIFunctionSchema,
    OpenAIFunctionToolSchema,
    ToolResponse,
)

from verl_credit.errors import ConfigError
from verl_credit.recipe.agent_loops import FAILED, FAULT
from verl_credit.turns.mcp.session import Refused, Session
from verl_credit.turns.mcp.settings import ToolSettings
from verl_credit.turns.search.faults import SearchFault

MOST_ERROR_CHARS = 1000
DEEPEST = 32


class _Property(OpenAIFunctionPropertySchema):
    """verl's class leaves out what a schema holds beside type, description and enum, and wants a type."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _typed(cls, given: dict) -> dict:
        if "type" in given:
            return given
        choices = given.get("anyOf") or given.get("oneOf") or []
        types = [one["type"] for one in choices if isinstance(one.get("type"), str)]
        return {**given, "type": list(dict.fromkeys(types)) or "object"}


class _Parameters(OpenAIFunctionParametersSchema):
    model_config = ConfigDict(extra="allow")

    properties: dict[str, _Property] = Field(default_factory=dict)


class _Function(OpenAIFunctionSchema):
    parameters: _Parameters


class MCPToolSchema(OpenAIFunctionToolSchema):
    """The server's schema, whole."""

    function: _Function


class MCPTool(BaseTool):
    """All tools of a server share the session of this process, and so do all trajectories.

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
        self.session = Session.of(self.settings.server)
        self.tool = _chosen(self.session, self.settings)
        self.name = self.settings.name or self.tool.name
        function = {"name": self.name, "description": self.tool.description or ""}
        function["parameters"] = {"type": "object", "properties": {}, **self.tool.input_schema}
        self.tool_schema = MCPToolSchema.model_validate({"type": "function", "function": function})
        self._rows: dict[str, dict] = {}
        self._rewards: dict[str, float | None] = {}

    async def create(self, instance_id: str | None = None, **kwargs) -> tuple[str, ToolResponse]:
        instance_id, response = await super().create(instance_id)
        self._rows[instance_id] = kwargs.get("create_kwargs") or {}
        return instance_id, response

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs):
        """Errors: ValueError for what the policy did wrongly."""
        row = self._rows.get(instance_id)
        if not isinstance(parameters, dict):
            raise ValueError("arguments: expected an object")
        try:
            meta = {"create_kwargs": row} if row else None
            result = await self.session.call(self.tool.name, sendable(parameters), meta)
        except Refused as refused:
            raise ValueError(str(refused)[:MOST_ERROR_CHARS]) from refused
        except SearchFault as fault:
            return ToolResponse(text=f"{FAILED} '{self.name}': {fault.code}"), None, {FAULT: fault}
        text = _text_of(result)
        if result.is_error:
            raise ValueError(text[:MOST_ERROR_CHARS])
        reward = self._rewards[instance_id] = (result.meta or {}).get("reward")
        return ToolResponse(text=text[: self.settings.max_chars]), reward, {}

    async def calc_reward(self, instance_id: str, **kwargs) -> float | None:
        """The reward of the instance's last call."""
        return self._rewards.get(instance_id)

    async def release(self, instance_id: str, **kwargs) -> None:
        self._rows.pop(instance_id, None)
        self._rewards.pop(instance_id, None)


def sendable(value: Any, depth: int = 0) -> Any:
    """The policy's value without lone surrogates. Raises ValueError for what JSON cannot hold and for deep nesting. The SDK
    ends the session of all rows where a message cannot be written."""
    if depth > DEEPEST:
        raise ValueError(f"arguments are nested more than {DEEPEST} deep")
    if isinstance(value, dict):
        return {sendable(key): sendable(one, depth + 1) for key, one in value.items()}
    if isinstance(value, list):
        return [sendable(one, depth + 1) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"arguments hold {value}, which is no number of JSON")
    return value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else value


def _chosen(session: Session, settings: ToolSettings):
    """The server's tool. Raises ConfigError where it has none of the name, or several and no name is given."""
    tools = {tool.name: tool for tool in session.tools()}
    if settings.tool is None and len(tools) == 1:
        return next(iter(tools.values()))
    if settings.tool not in tools:
        raise ConfigError(key="config.tool", value=settings.tool, accepted=sorted(tools))
    return tools[settings.tool]


def _text_of(result) -> str:
    """The result's text. What is no text is named in it."""
    parts = []
    for block in result.content:
        text = getattr(getattr(block, "resource", block), "text", None)
        parts.append(
            text if isinstance(text, str) else f"[{block.type}: {getattr(block, 'uri', 'left out')}]"
        )
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    return "\n".join(parts)
