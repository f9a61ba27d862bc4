"""verl's client of the engine for one trajectory: how it samples, which turns it repeats, which weights wrote each turn.

Agent loops of every author get `row_client`, because verl's trainer reads the versions of the weights from each row.

A rollout can go on after turns that were written before. The engine does not generate these, and their tools are called
again, so that every kind of tool comes to the state that it was in, also one that keeps its calls.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
from collections import deque
from collections.abc import Mapping, Sequence
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
        self._record.versions.append([output.extra_fields.get(name) for name in VERSIONS])
        return output


VERSIONS = ("min_global_steps", "max_global_steps")
"""The first and the last version of the weights that wrote a turn or a row, as verl names them."""


def row_client(client: Any, seed_parts: Sequence | None) -> tuple[Any, list[int]]:
    """(verl's client for one row, the versions of the weights that answered it so far). ``seed_parts``: where a call brings
    no seed, it gets one that follows from these parts and the number of the call; None: the engine takes no seed."""
    own, versions, calls = copy.copy(client), [], itertools.count()

    async def generate(*args, sampling_params: dict[str, Any], **request: Any) -> TokenOutput:
        if seed_parts is not None:
            sampling_params = {"seed": stable_seed(*seed_parts, next(calls))} | sampling_params
        output = await client.generate(*args, sampling_params=sampling_params, **request)
        versions.extend(one for name in VERSIONS if (one := output.extra_fields.get(name)) is not None)
        return output

    own.generate = generate
    return own, versions


def fill_versions(extra_fields: dict[str, Any], versions: Sequence[int], step: int) -> None:
    """Enters the `VERSIONS` that an agent loop left out. A row that no engine answered has the weights that ``step`` began
    with."""
    known = versions or [step - 1]
    for name, version in zip(VERSIONS, (min(known), max(known)), strict=True):
        if extra_fields.get(name) is None:
            extra_fields[name] = version


def seed_parts(config, row: Mapping[str, Any]) -> tuple:
    """What the seeds of a row's turns follow from. Training: one draw per step and place in the batch. Evaluation: the same
    draws at every step."""
    mode = row.get("sampling")
    own = ("train", row["global_steps"], row["uid"]) if mode is None else (mode, row["raw_prompt"])
    return config.seed, *((row[DRAW],) if DRAW in row else own), row["session_id"]


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
