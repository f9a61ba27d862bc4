"""verl's client of the engine for one trajectory: how it samples, which turns it repeats, which weights wrote each turn.

A rollout can go on after turns that were written before. The engine does not generate these, and their tools are called
again, so that every kind of tool comes to the state that it was in, also one that keeps its calls.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Sequence
from typing import Any

from verl.workers.rollout.replica import TokenOutput

from verl_credit.turns.rollout.book import RowRecord

REPLAY = "credit_replay"
"""Column of a prompt: token ids of the turns that are given, as JSON, because verl has no column of lists in lists."""
DRAW = "credit_draw"
"""Column of a prompt: its rollouts' seeds follow from this text, in place of step and prompt."""


def replay_column(turns: Sequence[Sequence[int]]) -> str:
    return json.dumps([list(turn) for turn in turns])


class NoToken(Exception):
    """The engine returned a turn without a token, with this stop reason: it aborted the request."""


class RowClient:
    """verl's client of the engine for one trajectory: it returns the given turns first, and records which version of the
    weights wrote each turn."""

    def __init__(self, client: Any, record: RowRecord, column: str | None = None):
        self._client, self._record = client, record
        self._given = deque(() if column is None else json.loads(column))
        if column is not None:
            record.replayed = len(self._given)

    async def generate(self, *, sampling_params: dict[str, Any], **request: Any) -> TokenOutput:
        if self._given:
            ids = self._given.popleft()
            # The log-probs of these tokens are not used, but where verl requests them it expects one per token.
            log_probs = [0.0] * len(ids) if sampling_params.get("logprobs") else None
            output = TokenOutput(token_ids=ids, log_probs=log_probs)
        else:
            output = await self._client.generate(sampling_params=sampling_params, **request)
            if not output.token_ids:
                raise NoToken(getattr(output, "stop_reason", None))
        fields = output.extra_fields
        self._record.versions.append([fields.get("min_global_steps"), fields.get("max_global_steps")])
        return output


def stable_seed(*parts) -> int:
    """A 63-bit seed from the parts' JSON: equal on every machine and Python run."""
    digest = hashlib.blake2b(json.dumps([str(p) for p in parts]).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def apply_sampling_mode(sampling_params: dict[str, Any], mode: str | None) -> dict[str, Any]:
    """Sampling parameters of a row: held-out evaluation requests ``greedy`` or ``sampled`` (T=1, nothing truncated)."""
    if mode is None:
        return dict(sampling_params)
    if mode not in ("greedy", "sampled"):
        raise ValueError(f"row field 'sampling' is {mode!r}: expected 'greedy' or 'sampled'")
    return {**sampling_params, "temperature": 0.0 if mode == "greedy" else 1.0, "top_p": 1.0, "top_k": -1}
