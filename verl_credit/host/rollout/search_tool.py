"""The ``search`` tool as the policy sees it: one required argument, pages as text."""

from __future__ import annotations

from typing import NamedTuple

from omegaconf import OmegaConf
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema

from verl_credit.turns.search.client import client_for
from verl_credit.turns.search.protocol import SCHEMA


class Lookup(NamedTuple):
    """What one search brought."""

    text: str
    """The observation, as the policy reads it."""
    page_ids: list[str]
    """In the order shown."""
    retries: int
    """Requests beyond the first."""


class SearchTool(BaseTool):
    """Shared by all trajectories of a worker process, so that connections are reused."""

    _shared: dict[str, SearchTool] = {}

    def __init__(self, settings):
        # BaseTool.__init__ prints the schema for every instance; nothing else of it is needed.
        self.config = settings
        self.tool_schema = OpenAIFunctionToolSchema.model_validate(SCHEMA)
        self.name = self.tool_schema.function.name
        self.client = client_for(settings)

    @classmethod
    def for_settings(cls, settings) -> SearchTool:
        key = OmegaConf.to_yaml(settings)
        if key not in cls._shared:
            cls._shared[key] = cls(settings)
        return cls._shared[key]

    async def lookup(self, query: str) -> Lookup:
        """Errors: SearchFault."""
        result = await self.client.search(query)
        page_ids = [page.id for page in result.pages]
        return Lookup(self.client.render(result), page_ids, result.attempts - 1)
