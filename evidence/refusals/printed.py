"""Writes README.md: configurations that are refused, and the line that `verl-credit explain` prints for each.

python evidence/refusals/printed.py > evidence/refusals/README.md
"""

from __future__ import annotations

import sys
from types import ModuleType

from verl_credit.errors import ConfigError
from verl_credit.recipe.compose import load_config

ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"
ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
MODE, CLIP = "algorithm.info_gain_norm_mode", f"{ACTOR}.policy_loss.dynamic_clip"
GAINS = f"{MODE}=turn-group-v1d"
"""Gains are scored with it, which a run that names no mode may not need."""
KWARGS, BYPASS = "reward.custom_reward_function.reward_kwargs", "algorithm.rollout_correction.bypass_mode"
WHOLE = "algorithm.algorithm_mode=my_module.own_algorithm"
REFUSED = [  # what is given: overrides of recipe lab, or the name of another recipe
    "algorithm.info_gain_nrom_mode=joint",
    "algorithm.gama=1",
    "serach.topk=3",
    f"{ACTOR}.policy_loss.dynamic_clp=true",
    f"{KWARGS}.format_penalti=1",
    "search.token=s3cret",
    "search.tokn_env=MY_TOKEN",
    "--config-name labb",
    "algorithm.advantage_params={a:1}",
    f"{GAINS} {ATTENTION}=sdpa algorithm.info_gain_scorer=branch",
    f"{GAINS} {MODEL}.use_remove_padding=false {ATTENTION}=auto",
    f"{GAINS} {ACTOR}.ulysses_sequence_parallel_size=2",
    f"{GAINS} actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size=2",
    f"{GAINS} {MODEL}.use_fused_kernels=true",
    f"{GAINS} {ACTOR}.use_dynamic_bsz=true actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=false",
    f"{GAINS} {BYPASS}=true algorithm.info_gain_scorer=branch",
    f"{GAINS} algorithm.info_gain_scorer=reference",
    f"{GAINS} {BYPASS}=true algorithm.info_gain_scorer=rows algorithm.transform_mode=gtpo "
    "algorithm.uncertainty_kind=shannon_entropy",
    f"{MODE}=turn-group algorithm.info_gain_curriculum.gain=[1,0.5]",
    f"{MODE}=joint {CLIP}=true",
    f"{MODE}=turn_gae",
    f"{MODE}=turn_gae algorithm.turn_values=feature",
    f"{MODE}=turn-group-v1d algorithm.turn_values=features",
    f"{MODE}=turn-group-v1d algorithm.adv_estimator=grpo",
    f"{MODE}=none algorithm.adv_estimator=grpo algorithm.advantage_mode=maxrl",
    f"{MODE}=turn-group-v1d {WHOLE}",
    f"{MODE}=none algorithm.advantage_mode=maxrl {WHOLE}",
    f"{MODE}=none algorithm.transform_mode=gtpo {WHOLE}",
    f"{MODE}=turn-group-v1d algorithm.transform_mode=my_module.by_episode",
    f"{MODE}=turn-group-v1d algorithm.transform_mode=gtpo_canonical",
    f"{MODE}=none algorithm.transform_mode=gtpo_canonical algorithm.advantage_mode=maxrl",
    f"{MODE}=none algorithm.transform_mode=grpo_s algorithm.uncertainty_kind=surprisal",
    f"algorithm.advantage_mode=maxrl {KWARGS}.format_penalty=0.5",
    "algorithm.advantage_mode=maxrl algorithm.use_kl_in_reward=true",
    f"{KWARGS}.format_penalty=null",
    "reward.reward_manager.name=dapo",
    "algorithm.transform_mode=gtpo_sepa algorithm.sepa.steps=0",
    "actor_rollout_ref.model.path='~no_one/model'",
    "actor_rollout_ref.rollout.multi_turn.function_tool_path=3",
    "environment.path=gymnasium",
]
NO_LAB = "lab.dir=labs/not_built"
"""A refusal may name the family of a policy that is there, and the usual lab is there only after its first run."""
HEAD = """# What a refusal prints

The reviews of a newcomer's first day and of strangers' files are `newcomer.md` and `strangers.md` of commit 23dae403.

Each row is given to recipe `lab`, or names another recipe, and has the refusal that `verl-credit explain` and
`verl-credit train` print (exit code 4). `my_module` is a user's. `python evidence/refusals/printed.py` prints this page,
and a test compares the two (`tests/recipe/test_printed_refusals.py`).

| given | printed |
|---|---|"""


def own_module() -> ModuleType:
    def own_algorithm(context):
        return context.logprobs_G

    def by_episode(context):
        rows = zip(context.episode_advantages, context.logprobs_G, strict=True)
        return [[advantage] * len(own) for advantage, own in rows]

    module = ModuleType("my_module")
    module.own_algorithm, module.by_episode = own_algorithm, by_episode
    return module


def printed(given: str) -> str:
    recipe, overrides = (given.split()[1], []) if given.startswith("--") else ("lab", given.split())
    try:
        load_config(recipe, [*overrides, NO_LAB])
    except ConfigError as error:
        return str(error)
    raise SystemExit(f"{given} is accepted")


def page() -> str:
    sys.modules["my_module"] = own_module()
    try:
        rows = [f"| `{given}` | `{printed(given)}` |" for given in REFUSED]
    finally:
        del sys.modules["my_module"]
    return "\n".join([HEAD, *rows, ""])


if __name__ == "__main__":
    print(page(), end="")
