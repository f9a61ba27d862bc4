"""``search_agent``: the turn agent with our search tool beside the recipe's own; search.max_searches limits its turns."""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.agent_loop import register
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

from verl_credit.host.rollout.agent_loop import RowFault, TurnAgentLoop
from verl_credit.names import AGENT_NAME
from verl_credit.turns.rollout.search.client import SearchFault, client_for
from verl_credit.turns.rollout.search.wire import SCHEMA, bad_query_reason, without_markup


class SearchTool(BaseTool):
    """All trajectories of a worker process share the tool, so that connections are reused."""

    _shared: tuple[Any, SearchTool | None] = (None, None)

    def __init__(self, settings):
        # verl's BaseTool.__init__ prints the schema for every instance, therefore it is not called.
        self.config = settings
        self.tool_schema = OpenAIFunctionToolSchema.model_validate(SCHEMA)
        self.name = self.tool_schema.function.name
        self.client = client_for(settings)

    @classmethod
    def for_settings(cls, settings) -> SearchTool:
        """A worker has one configuration, whose ``search`` is one object."""
        if cls._shared[0] is not settings:
            cls._shared = settings, cls(settings)
        return cls._shared[1]

    async def lookup(self, query: str) -> tuple[str, list[str], int]:
        """The observation, the ids of its pages in order, and how many times it was retried. Errors: SearchFault."""
        result = await self.client.search(query)
        page_ids = [page.id for page in result.pages]
        return self.client.render(result), page_ids, result.attempts - 1


@register(AGENT_NAME)
class SearchAgentLoop(TurnAgentLoop):
    """verl makes one instance per trajectory."""

    def __init__(self, *args, tools=None, **kwargs):
        super().__init__(*args, tools=tools, **kwargs)
        settings = self.config.search
        # search.max_searches=0 allows one turn, so that the recipe's other tools could never be called either.
        self.search = SearchTool.for_settings(settings) if settings.max_searches else None
        self.tools = {**self.tools, self.search.name: self.search} if self.search else {}
        self.tool_schemas = [
            tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for tool in self.tools.values()
        ]
        self.max_assistant_turns = settings.max_searches + 1

    async def _execute(self, call, tool_call, tools_kwargs, agent_data):
        if tool_call.name != self.search.name:
            return await super()._execute(call, tool_call, tools_kwargs, agent_data)
        reason, query = bad_query_reason(tool_call.arguments)
        if reason is not None:
            self.record.bad_calls += 1
            return ToolResponse(text=reason), None, {}
        try:
            text, page_ids, retries = await self.search.lookup(query)
        except SearchFault as fault:
            self.record.n_retries += max(fault.attempts - 1, 0)
            raise RowFault(fault.code) from fault
        self.record.n_searches += 1
        self.record.n_retries += retries
        self.record.searches.append({"turn": call["turn"], "query": query, "pages": page_ids})
        return ToolResponse(text=without_markup(text, self.control_tokens)), None, {}
