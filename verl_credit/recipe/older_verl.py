"""Keys and values of older versions of verl, of its forks and of its other trainers: their place now, or why there is none.

`adopt` translates a user's launch by these tables. The rules refuse by `OLDER` what would be accepted and do nothing, and
name by `remedy_of` the place of a key that nothing here has, whose nearest spelling would be another key.
"""

from __future__ import annotations

import re

from verl_credit.config.engines import ENGINE, ENGINES
from verl_credit.config.gone import gone_key
from verl_credit.names import ADV_ESTIMATOR, COLOCATE_MODE, ENV_AGENT, SEPARATE_MODE, TRAINER_MODE, TURN_AGENT

MANAGER = "reward.reward_manager"
ROLLOUT, ACTOR, REF, MODEL = (f"actor_rollout_ref.{role}" for role in ("rollout", "actor", "ref", "model"))
MULTI_TURN, ULYSSES = f"{ROLLOUT}.multi_turn", "ulysses_sequence_parallel_size"
OLDER = {
    "reward_model.reward_manager": f"{MANAGER}.name", "reward_model.reward_loop_source": f"{MANAGER}.source",
    "reward_model.reward_loop_module_path": f"{MANAGER}.module.path", "reward_model.num_workers": "reward.num_workers",
    "reward_model.reward_loop_class_name": f"{MANAGER}.module.name", "reward_model.reward_kwargs": "reward.reward_kwargs",
    "reward_model.model.path": "reward.reward_model.model_path",
    **{name: f"reward.{name}" for name in ("custom_reward_function", "sandbox_fusion", "reward_model")},
}  # fmt: skip
"""Keys of older versions of verl, and sections, which verl 0.9.1 lists as null and its v1 trainer never reads: their places
now. The longest name that fits a key is its own."""

COUNTS_ROWS = (f"{ROLLOUT}.n_agent", "agent_grpo.n", "env.rollout.n")
"""The rollouts of a question in forks whose ppo_mini_batch_size counts rows, because their workers see rollout.n=1."""
RENAMED = {
    **OLDER,
    "reward_model.overlong_buffer": "reward.reward_kwargs.overlong_buffer_cfg",
    **dict.fromkeys(
        (
            f"{MULTI_TURN}.max_turns",
            f"{ROLLOUT}.max_turns",
            f"{ROLLOUT}.agent.max_turns",
            "rollout_manager.max_turns",
            "actor_rollout_ref.agent.max_turns",
            "agent.max_turns",
        ),
        f"{MULTI_TURN}.max_assistant_turns",
    ),
    **{f"data.{split}_data_num": f"data.{split}_max_samples" for split in ("train", "val")},
    "data.shuffle_train_dataloader": "data.shuffle",
    "data.max_model_len": f"{ROLLOUT}.max_model_len",
    **dict.fromkeys((*COUNTS_ROWS, "rollout.n", f"{ROLLOUT}.n_samples", "n_samples"), f"{ROLLOUT}.n"),
    **dict.fromkeys(("trainer.epochs", "trainer.num_epochs"), "trainer.total_epochs"),
    **dict.fromkeys(("lr", "learning_rate", f"{ACTOR}.lr"), f"{ACTOR}.optim.lr"),
    **{f"{MODEL}.lora.{name}": f"{MODEL}.lora_{name}" for name in ("rank", "alpha", "adapter_path")},
    **{f"{MODEL}.lora.{name}": f"{MODEL}.{name}" for name in ("target_modules", "exclude_modules")},
    "env.seed": "seed",
    "env.search.search_url": "search.url",
    "env.search.topk": "search.topk",
    **{f"retriever.{name}": f"search.{name}" for name in ("url", "topk")},
    **{f"rollout.{name}": f"{ROLLOUT}.{name}" for name in ("nnodes", "n_gpus_per_node")},
    "algorithm.gigpo.step_advantage_w": "algorithm.turn_params.step_weight",
    "algorithm.gigpo.mode": "algorithm.turn_params.norm",
}
"""A key, or the section of a key, and its place now. The longest name that fits is the key's own."""

PER_GPU = {
    f"{role}.{name}": f"{role}.{name}_per_gpu"
    for role, name in (
        (ACTOR, "ppo_micro_batch_size"), (ROLLOUT, "log_prob_micro_batch_size"), (REF, "log_prob_micro_batch_size"),
    )
}  # fmt: skip
"""Keys that counted the rows of all GPUs, and those that count the rows of one."""

MEGATRON = "the turns are built for verl's FSDP engine, which takes its place; Megatron is not possible"
NPU = "Ascend NPUs are not possible; the recipe is for CUDA (or hardware=laptop)"
ONE_RANK = (
    "attention over several ranks is not built, so that a row has to fit one GPU; possible with flash-attn: "
    "attn_implementation=flash_attention_2, use_remove_padding=true, algorithm.info_gain_scorer=rows"
)
_BY_FAMILY = "attention and padding follow from the model's family (docs/attention.md#model-families)"
_CURRICULUM = "algorithm.info_gain_curriculum has the weights of gains and outcomes"
_EQUAL = "equal states alone are one state here"
_MASKED = "what tools return is never trained on here"
_PENALTY = "there is no penalty for a bad call; credit/tool/bad_calls counts them"
NO_CRITIC = "no critic is adopted (algorithm.turn_values=critic makes one)"
OWN_ENVIRONMENT = (
    "a fork's environment is its own code, and only its search is adopted; an environment of docs/environments.md takes its "
    f"place ({ROLLOUT}.agent.default_agent_loop={ENV_AGENT} environment.path=...), or an agent loop of yours, or tools "
    "(docs/agent-loops.md)"
)
GONE = {
    f"{MULTI_TURN}.interaction_config_path": (
        "verl 0.9.1 has no interactions: an agent loop of your own takes their place (docs/agent-loops.md)"
    ),
    "reward_model.launch_reward_fn_async": "rewards are computed beside the rollouts in verl 0.9.1",
    **dict.fromkeys((f"{MODEL}.lora.dropout", f"{MODEL}.lora.type"), "verl's FSDP engine reads no such key"),
    "critic": NO_CRITIC,
    "trainer.critic_warmup": NO_CRITIC,
    f"{ACTOR}.megatron": MEGATRON,
    f"{REF}.megatron": MEGATRON,
    **{f"{role}.{ULYSSES}": ONE_RANK for role in (ACTOR, REF, f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config")},
    "actor_rollout_ref.model.use_remove_padding": _BY_FAMILY,
    "actor_rollout_ref.model.override_config.attn_implementation": _BY_FAMILY,
    "actor_rollout_ref.model.use_fused_kernels": "verl's fused head does not hand the rows' places on to the model",
    "actor_rollout_ref.model.fused_kernel_options": "verl's fused head is off",
    f"{ACTOR}.fsdp_config.grad_offload": "verl's engine offloads gradients together with the parameters",
    **dict.fromkeys(("algorithm.state_masking", f"{ACTOR}.state_masking"), _MASKED),
    **{f"{ACTOR}.{name}": _PENALTY for name in ("use_invalid_action_penalty", "invalid_action_penalty_coef")},
    "trainer.use_v1": "verl_credit trains with verl's v1 trainer, whose older one verl removes",
    "trainer.default_hdfs_dir": "verl 0.9.1 saves to trainer.default_local_dir",
    "algorithm.no_think_rl": "thoughts are the policy's own tokens (search.include_reasoning)",
    "algorithm.use_curriculum": _CURRICULUM,
    **{f"algorithm.curriculum_{of}_{end}": _CURRICULUM for of in ("f1", "ig") for end in ("init", "final")},
    **dict.fromkeys(("algorithm.gigpo.enable_similarity", "algorithm.gigpo.similarity_thresh"), _EQUAL),
    "algorithm.gigpo": "verl-credit modes lists the options of gigpo",
    "env": f"{OWN_ENVIRONMENT}; a dialogue keeps its whole history here",
    "search_engine": "search.url names the server",
    "codeact_env_disabled": "no code runs here unless a tool of yours runs it",
    "async_training.partial_rollout": "rollouts always run on into the next weights in that trainer",
    "async_training": "verl's v1 trainer has no such key",
    "rollout": "verl's v1 trainer counts steps",
    "hydra": "verl-credit writes into run_dir",
}
"""A key, or the section of a key, that has no place, and the reason. The longest name that fits is the key's own."""

_SEARCHES = "search.max_searches=N, the calls of a trajectory; the turn that answers is one more"
INSTEAD = {
    "max_turns": _SEARCHES,
    "env.max_steps": _SEARCHES,
    "do_search": "search.max_searches=N, which 0 switches off",
    "data.max_obs_length": "search.max_page_chars=N, the characters of a page",
    "data.max_start_length": "data.max_prompt_length=N",
    "search_engine": "search.url=URL, of a server with POST /retrieve",
    "algorithm.use_info_gain": "algorithm.info_gain_norm_mode=joint, IGPO's mode",
    "algorithm.gigpo": "algorithm.info_gain_norm_mode=gigpo, whose options are keys of algorithm.turn_params",
    "algorithm.hgpo": "algorithm.info_gain_norm_mode=hgpo, whose options are keys of algorithm.turn_params",
    "algorithm.g2po": "algorithm.info_gain_norm_mode=g2po, whose options are keys of algorithm.turn_params",
    "algorithm.less_negative": "algorithm.info_gain_norm_mode=calibadv, whose options are keys of algorithm.turn_params",
    f"{ROLLOUT}.micro_batch_size": f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=N",
}
"""What to write in place of a key whose value has another meaning here."""

TRAINERS = {"sync": TRAINER_MODE, "colocate_async": COLOCATE_MODE, "separate_async": SEPARATE_MODE}
STRATEGIES = (f"{ACTOR}.strategy", f"{REF}.strategy")
_SAME, _WRITTEN = "the same trainer, with turns", "the chat template decides how a call is written"
KEEPS_TURNS = (
    "without turn_ids of yours a turn is a run of the response mask (algorithm.turn_ids), and without turn_rewards "
    "tool_reward earns nothing (docs/agent-loops.md)"
)
VALUES = {
    ("trainer.device", "npu"): (None, NPU),
    **{(key, "megatron"): (None, MEGATRON) for key in ("model_engine", *STRATEGIES)},
    **{("trainer.v1.trainer_mode", name): (mode, _SAME) for name, mode in TRAINERS.items()},
    **{(ENGINE, f"{name}_async"): (name, "every engine is asynchronous in verl 0.9.1") for name in ENGINES},
    **dict.fromkeys(((f"{MULTI_TURN}.format", name) for name in ("qwen", "llama3_json")), ("auto", _WRITTEN)),
    (f"{ROLLOUT}.agent.default_agent_loop", "tool_agent"): (TURN_AGENT, "verl's loop writes no turns"),
    (f"{ROLLOUT}.agent.default_agent_loop", "single_turn_agent"): (None, "verl's loop writes no turns"),
}
"""The value now of a key with an older value, or of another engine (None: the key is left out), and the reason."""

IN_OUR_PLACE = (
    f"your outcomes' advantages, and each turn's credit on top (algorithm.adv_estimator={ADV_ESTIMATOR})"
)
NO_BASELINE = "verl's has no baseline by group; this operator takes the group's mean off first"
NEAREST = "verl_credit has no such outcome operator: group-normalised outcomes take its place"
ESTIMATORS = {
    "grpo": ("grpo", IN_OUR_PLACE), "grpo_vectorized": ("grpo", IN_OUR_PLACE), "rloo": ("rloo", IN_OUR_PLACE),
    "rloo_vectorized": ("rloo", IN_OUR_PLACE), "reinforce_plus_plus": ("reinforce_pp", NO_BASELINE),
    "reinforce_plus_plus_baseline": ("reinforce_pp", IN_OUR_PLACE), ADV_ESTIMATOR: ("grpo", "it is ours"),
    "gae": ("grpo", f"{NO_CRITIC}: group-normalised outcomes take its place"),
}  # fmt: skip
"""An estimator's outcome operator here (``algorithm.advantage_mode``), and the reason; `NEAREST` for any other."""
LEAVES_ONE_OUT = re.compile(r"(^|_)r?loo(p|_|$)|leave_?one_?out")
"""The names that estimators of the operator rloo have elsewhere."""


def longest(table: dict[str, str], key: str) -> str | None:
    """The longest name in ``table`` that is the key, or a section of it."""
    return max((name for name in table if f"{key}.".startswith(f"{name}.")), key=len, default=None)


def renamed(key: str) -> str | None:
    """The place now of a key; None where the tables know of none."""
    old = longest(RENAMED, key)
    return None if old is None else RENAMED[old] + key.removeprefix(old)


def remedy_of(key: str) -> str:
    """What to write in place of a key that nothing here has; "" where the tables know of none."""
    if before := gone_key(key):
        return before
    name = longest(RENAMED | GONE | INSTEAD, key)
    if name in INSTEAD:
        return INSTEAD[name]
    if (place := renamed(key)) and name in RENAMED:
        plus = "+" if place.startswith("algorithm.turn_params.") else ""
        return f"{plus}{place}=VALUE"
    return "" if name is None else f"leave it out: {GONE[name]}"
