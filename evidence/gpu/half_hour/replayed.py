"""``replayed_search``: a prompt's rollouts begin with different prepared turns, and the policy writes the last one.

A policy with random weights writes no call. Its rollouts begin with turns that were written before: their searches are made
and their observations are read as in any rollout. Prompts have 2 to 4 trajectories, so that gains differ within a group.
"""

from __future__ import annotations

import json
from typing import Any

from verl_credit.host.rollout.agent_loop import TurnAgentLoopOutput
from verl_credit.host.rollout.engine_client import REPLAY, replay_column
from verl_credit.host.rollout.search_agent import SearchAgentLoop

REPLAYS = "replays"
"""Column of a prompt: JSON, a list of trajectories, each a list of turns of token ids that end with a search call."""


class ReplayedSearch(SearchAgentLoop):
    """verl imports it from agents.yaml; rows name it in their column ``agent_name``."""

    async def run(self, sampling_params: dict[str, Any], **kwargs) -> TurnAgentLoopOutput:
        turns = replayed_turns(
            kwargs.pop(REPLAYS), int(kwargs["session_id"]), self.config.search.max_searches
        )
        return await super().run(sampling_params, **kwargs | {REPLAY: replay_column(turns)})


def replayed_turns(column: str, session: int, most: int) -> list[list[int]]:
    """The turns that the rollout number ``session`` of a prompt begins with; at most ``most``, so that one turn is left."""
    trajectories = json.loads(column)
    return trajectories[session % len(trajectories)][:most]
