"""A rollout behind turns that were written before: the engine is not asked for these, and their tools are called again.

So every kind of tool comes to the state that it was in, also one that remembers its calls.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from typing import Any

from verl.workers.rollout.replica import TokenOutput

REPLAY = "credit_replay"
"""Column of a prompt: the turns that stand already, token ids each, as JSON; a list in a list is no column of verl's."""
DRAW = "credit_draw"
"""Column of a prompt: what the seeds of its rollouts follow from, in place of step and prompt."""


def replay_column(turns: Sequence[Sequence[int]]) -> str:
    return json.dumps([list(turn) for turn in turns])


class ReplayingClient:
    """verl's client of the engine for one trajectory, whose first turns are given."""

    def __init__(self, client: Any, column: str):
        self._client, self._turns = client, deque(json.loads(column))

    @property
    def left(self) -> int:
        """Turns that it has not said yet."""
        return len(self._turns)

    async def generate(self, *, sampling_params: dict[str, Any], **request: Any) -> TokenOutput:
        if not self._turns:
            return await self._client.generate(sampling_params=sampling_params, **request)
        ids = self._turns.popleft()
        # Nobody reads the log-probs of these tokens, but verl keeps a list as long as the turn where it asked for one.
        return TokenOutput(
            token_ids=ids, log_probs=[0.0] * len(ids) if sampling_params.get("logprobs") else None
        )
