"""Information gain by the rollout server: its log-probs of a prompt that ends with the gold answer.

The trajectory's own tokens are still in the server's prefix cache, so that an answer costs little more than its own
tokens. Scores are those of the rollout engine (its precision, its kernels), not of the trainer's forward.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence

import torch

from verl_credit.host.gain_requests import Request

Generate = Callable[[list[int], dict], Awaitable]


async def server_score(
    generate: Generate, context: Sequence[int], token_ids: Sequence[int], n_gold: int
) -> float:
    """Mean log-prob of the last ``n_gold`` tokens of ``context + token_ids``, at temperature 1.

    vLLM returns uninitialised log-probs for cached positions: a score is read only where every gold token was predicted
    from a position that the server says it computed, otherwise the prompt is scored again without the cache. Entries
    are aligned from the end and their token ids are compared. Raises RuntimeError when the server gives no such log-probs.
    """
    prompt = [*context, *token_ids]
    first = len(prompt) - n_gold - 1  # the position that predicts the first gold token
    for skip_cache in (False, True):
        output = await generate(
            prompt,
            {
                "max_tokens": 1,
                "temperature": 1.0,
                "prompt_logprobs": 0,
                "detokenize": False,
                "skip_reading_prefix_cache": skip_cache,
            },
        )
        said = output.extra_fields
        values, ids = said.get("prompt_logprobs"), said.get("prompt_ids")
        if values is None or ids is None or len(values) != len(prompt):
            raise RuntimeError(
                f"algorithm.info_gain_scorer=server: the rollout server gave {len(values or [])} prompt log-probs for "
                f"{len(prompt)} tokens (stop reason {output.stop_reason!r})"
            )
        cached = said.get("num_cached_tokens")
        if (cached is None and not skip_cache) or (cached or 0) > first:  # None: the server does not say
            continue
        read = slice(first, first + n_gold)
        if [entry[0] for entry in ids[read]] != prompt[-n_gold:]:
            raise RuntimeError(
                "algorithm.info_gain_scorer=server: the log-probs are not those of the answer's tokens"
            )
        return math.fsum(entry[0] for entry in values[read]) / n_gold
    raise RuntimeError(
        "algorithm.info_gain_scorer=server: the server read its prefix cache although told not to"
    )


def scores_of_records(requests: Sequence[Request], records: Sequence[dict]) -> torch.Tensor:
    """What agent loops brought along, float64 [N]; NaN, a failed score, where a row lacks one."""
    found = [{(column, alias): value for column, alias, value in record["scores"]} for record in records]
    return torch.tensor(
        [found[r.row].get((r.column, r.alias), math.nan) for r in requests], dtype=torch.float64
    )
