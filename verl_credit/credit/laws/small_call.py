"""A user's bare function on a small input, without tensors around it, so that thousands of calls cost little."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl_credit.credit.outcome.outcome_plugin import on_lists
from verl_credit.credit.plugins import (
    AlgorithmContext,
    TransformContext,
    UncertaintyContext,
    as_transform_spec,
    as_uncertainty_spec,
)

REWARDS, TOKENS, PLANNING = [1.0, 0.0], [[0.5, 1.0], [2.0, 0.25, 1.0]], [[0, 1], [1, 0, 0]]
LOG_PROBS = [[-h for h in row] for row in TOKENS]
TURNS = {"turn_ids_G": [[0, 0], [0, 1, 1]], "turn_rewards_G": [[], [0.5]]}


def small_call(found: Any, name: str, kind: str, params: dict | None) -> Callable[[], Any]:
    params = dict(params or {})
    if kind == "outcome":
        call = on_lists(found, name, params)
        return lambda: call(list(REWARDS))
    if kind == "algorithm":
        context = AlgorithmContext(
            REWARDS, LOG_PROBS, PLANNING, params, precomputed_entropies_G=TOKENS, **TURNS
        )
        return lambda: found(context)
    if kind == "uncertainty":
        spec = as_uncertainty_spec(found, name)
        context = UncertaintyContext(LOG_PROBS[0], None, TOKENS[0], PLANNING[0], params)
        return lambda: spec.compute(context)
    spec = as_transform_spec(found, name)
    if spec.compute_context is None:
        return lambda: None  # its parts get lists through our code, one small call at a time
    context = TransformContext(
        episode_advantages=[1.0, -1.0],
        logprobs_G=LOG_PROBS,
        planning_masks_G=PLANNING if spec.needs_planning else [[], []],
        params=params,
        uncertainties_G=TOKENS,
        turn_advantages_G=[[1.0, 1.0], [-0.5, -1.0, -1.0]],
    )
    return lambda: spec.compute_context(context)
