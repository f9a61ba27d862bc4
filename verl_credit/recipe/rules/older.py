"""Refuses keys of older versions of verl and of other projects, each with the key that takes its place.

verl 0.9.1 composes some older keys without reading them, so that a user's reward function would not be used. `FOREIGN` has
keys of projects that are built on a copy of verl: their nearest spelling here is another key.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from verl_credit.config.fit import MOST
from verl_credit.errors import ConfigError
from verl_credit.recipe.older_verl import OLDER

OLD_TRAINER = "trainer.use_v1"
_SEARCHES = "search.max_searches=N, the calls of a trajectory; the turn that answers is one more"
_GIGPO = "algorithm.info_gain_norm_mode=gigpo, whose options are keys of algorithm.turn_params"
FOREIGN = {
    # Search-R1
    "max_turns": _SEARCHES,
    "do_search": "search.max_searches=0, which switches the search off",
    "retriever.url": "search.url=URL",
    "retriever.topk": "search.topk=N",
    "data.max_obs_length": "search.max_page_chars=N, the characters of a page",
    "data.max_start_length": "data.max_prompt_length=N",
    "data.train_data_num": "data.train_max_samples=N",
    "data.val_data_num": "data.val_max_samples=N",
    "data.shuffle_train_dataloader": "data.shuffle=true",
    "algorithm.no_think_rl": "search.include_reasoning=false, so that calls and answers in a thought do not count",
    "algorithm.state_masking": "leave it out: tokens that a tool returned are never trained",
    "actor_rollout_ref.actor.state_masking": "leave it out: tokens that a tool returned are never trained",
    "actor_rollout_ref.rollout.n_agent": "actor_rollout_ref.rollout.n=N",
    # verl-agent and projects built on it
    "algorithm.gigpo.step_advantage_w": "+algorithm.turn_params.step_weight=W, with algorithm.info_gain_norm_mode=gigpo",
    "algorithm.gigpo.mode": "+algorithm.turn_params.norm=mean_norm, or mean_std_norm, with "
                            "algorithm.info_gain_norm_mode=gigpo",
    "algorithm.gigpo.enable_similarity": "algorithm.turn_anchor_similarity=S, and null where it is off",
    "algorithm.gigpo.similarity_thresh": "algorithm.turn_anchor_similarity=S",
    "algorithm.gigpo": _GIGPO,
    "algorithm.hgpo": "algorithm.info_gain_norm_mode=hgpo, whose options are keys of algorithm.turn_params",
    "env.max_steps": _SEARCHES,
    "env.rollout.n": "actor_rollout_ref.rollout.n=N",
    "env.search.search_url": "search.url=URL",
    "env.search.topk": "search.topk=N",
    "env.seed": "seed=N",
    "env": "leave it out: the environment is the search tool (search.*), or tools of yours "
           "(actor_rollout_ref.rollout.multi_turn.tool_config_path)",
    # IGPO
    "search_engine": "search.url=URL, of a server with POST /retrieve",
    "algorithm.use_info_gain": "algorithm.info_gain_norm_mode=joint, IGPO's mode",
    # verl 0.9's separate rollouts, and older versions of verl
    "rollout.nnodes": "actor_rollout_ref.rollout.nnodes=N, with trainer.v1.trainer_mode=credit_separate_async",
    "rollout.n_gpus_per_node": "actor_rollout_ref.rollout.n_gpus_per_node=N, with "
                               "trainer.v1.trainer_mode=credit_separate_async",
    "actor_rollout_ref.rollout.multi_turn.max_turns": f"{MOST}=N",
    "actor_rollout_ref.rollout.max_turns": f"{MOST}=N",
    "actor_rollout_ref.actor.fsdp_config.grad_offload": "actor_rollout_ref.actor.fsdp_config.param_offload=true",
    "actor_rollout_ref.rollout.micro_batch_size": "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=N",
}  # fmt: skip
"""Keys of other projects, and sections of them: what to write here. The longest name that fits a key is its own."""


def remedy_of(key: str) -> str:
    """What to write in place of another project's key; "" where it is not known."""
    fits = [name for name in FOREIGN if f"{key}.".startswith(f"{name}.")]
    return FOREIGN[max(fits, key=len)] if fits else ""


def validate_older(values: Iterable[tuple[str, Any]]) -> Iterator[ConfigError]:
    """Yields a refusal for every key of an older verl, which would be accepted and do nothing."""
    for key, value in values:
        if key == OLD_TRAINER and value is not None and not value:
            use = "turns are trained by verl's v1 trainer alone, and nothing here starts the older one; leave it out"
            yield ConfigError(key=key, value=value, accepted=use)
        old = next((name for name in OLDER if f"{key}.".startswith(f"{name}.")), None)
        if old is not None and value is not None:
            now = OLDER[old] + key.removeprefix(old)
            use = f"a key of an older verl, which nothing reads now; use {now}"
            yield ConfigError(key=key, value=value, accepted=use, meant=now)
