"""Warns at the start of settings that are allowed and are probably mistakes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from verl_credit.config.resolved import Config
from verl_credit.precision import cpu_precision
from verl_credit.recipe.agent_loops import may_call
from verl_credit.recipe.auto import COMPUTES_IN, FULL, compute_dtype
from verl_credit.recipe.rules.trainer_mode import rollouts_too_old

CHARACTERS = 4  # English has about so many per token
NORMALISES_TWICE = {"gdpo": "per group and reward, then over the whole batch"}


def warnings_of(config: Config) -> list[str]:
    """Returns a sentence with keys and values for every warning."""
    return [
        *_clip(config),
        *_sampling(config),
        *_normalisation(config),
        *_results_fit(config),
        *_manager(config),
        *_probe(config),
        *_precision(config),
        *_bounds(config),
        *rollouts_too_old(config),
    ]


def _clip(config: Config) -> Iterator[str]:
    actor, batch = config.actor_rollout_ref.actor, config.data.train_batch_size
    if batch // actor.ppo_mini_batch_size * actor.ppo_epochs == 1:
        yield (
            f"the clip can never act: with actor_rollout_ref.actor.ppo_mini_batch_size={actor.ppo_mini_batch_size}, "
            f"ppo_epochs={actor.ppo_epochs} and data.train_batch_size={batch} there is one update a step, at which every "
            "ratio is 1; a smaller mini-batch makes several"
        )


def _sampling(config: Config) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    cut = [f"top_p={rollout.top_p}"] if rollout.top_p < 1 else []
    cut += [f"top_k={rollout.top_k}"] if rollout.top_k > 0 else []
    if cut:
        yield (
            f"actor_rollout_ref.rollout.{', '.join(cut)}: rollouts are drawn from a truncated distribution, and the policy "
            "that is trained is the whole one; its ratios are off by the mass that was cut. Unbiased: top_p=1, top_k=-1"
        )


def _normalisation(config: Config) -> Iterator[str]:
    estimator = config.algorithm.adv_estimator
    if estimator in NORMALISES_TWICE:
        yield (
            f"algorithm.adv_estimator={estimator}: verl normalises twice, {NORMALISES_TWICE[estimator]}; the size of an "
            "advantage then depends on the other prompts of the batch"
        )


def _results_fit(config: Config) -> Iterator[str]:
    """Warns where turns and search results together exceed the response. (Turns that alone exceed it are refused.)"""
    search, tokens = config.search, config.data.max_response_length
    if not search.max_searches:
        return
    result = math.ceil(search.topk * search.max_page_chars / CHARACTERS)
    turns, results = (search.max_searches + 1) * search.max_new_tokens, search.max_searches * result
    if turns + results > tokens:
        yield (
            f"data.max_response_length={tokens} does not hold all turns at full length: search.max_searches+1="
            f"{search.max_searches + 1} of search.max_new_tokens={search.max_new_tokens} are {turns} tokens, and what "
            f"{search.max_searches} searches return (search.topk={search.topk} pages of max_page_chars="
            f"{search.max_page_chars}, {CHARACTERS} characters a token, titles and markup not counted) about {results} "
            "more. Rows that do not fit end without an answer (credit/stop/length)"
        )


def _manager(config: Config) -> Iterator[str]:
    manager = config.reward.reward_manager
    if manager.source != "register" and may_call(config):
        yield (
            f"reward.reward_manager.source={manager.source}: a manager of yours has to hand tool_extra_fields to the reward "
            "function, as verl's naive does; without them an answer in what a tool returns counts as the policy's"
        )


def _probe(config: Config) -> Iterator[str]:
    if config.probe.every and (dtype := compute_dtype(config)) not in FULL:
        yield (
            f"probe.every={config.probe.every}: {COMPUTES_IN}={dtype}, whose rounding can be larger than the change of "
            "entropy that one update makes; read credit/probe/delta_h with that in mind, or compute in fp32"
        )


def _precision(config: Config) -> Iterator[str]:
    if (
        config.trainer.device == "cpu"
        and (dtype := compute_dtype(config)) not in FULL
        and cpu_precision() in FULL
    ):
        yield (
            f"{COMPUTES_IN}={dtype}: this CPU has no instructions for it, and computes many times slower than "
            "in fp32; set it to fp32, and actor_rollout_ref.rollout.dtype to float32"
        )


def _bounds(config: Config) -> Iterator[str]:
    """Warns of large bounds: YAML reads two bounds, the first a whole number, as a single large number."""
    given = config.algorithm.get("rollout_correction") or {}
    for kind in ("rollout_is", "rollout_rs"):
        bound = given.get(f"{kind}_threshold")
        if given.get(kind) is not None and isinstance(bound, int | float) and bound >= 10:
            yield (
                f"algorithm.rollout_correction.{kind}_threshold={bound}: one bound, {bound}. Two bounds are written "
                "1.0_5.0, each with a point: 1_5 is read as the number 15"
            )
