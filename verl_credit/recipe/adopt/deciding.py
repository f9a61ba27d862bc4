"""The keys that decide what an adopted launch trains, and the keys that close the gap where one of them is lost."""

from __future__ import annotations

import re

from verl_credit.config.fit import DEFAULT
from verl_credit.config.gone import longest
from verl_credit.recipe.agent_loops import KEYS, LISTED, MULTI_TURN
from verl_credit.recipe.older_verl import ACTOR, MANAGER, ROLLOUT, renamed
from verl_credit.recipe.step_size import BATCH

STEPS, AHEAD = "trainer.total_training_steps", "trainer.v1.separate_async.num_warmup_batches"
UPDATES, AT_ONCE, STALE = (
    f"async_training.{name}"
    for name in ("trigger_parameter_sync_step", "require_batches", "staleness_threshold")
)
TOTAL = "rollout.total_rollout_steps"
ASYNC = {UPDATES: BATCH, AT_ONCE: BATCH, STALE: AHEAD, TOTAL: STEPS}
"""Keys of verl's fully asynchronous trainer, and the key that each becomes."""
TURNS = (*(f"{MULTI_TURN}.{key}" for key in KEYS), DEFAULT, "search.max_searches")
REWARD = ("reward.custom_reward_function.path", f"{MANAGER}.name", f"{MANAGER}.source")
_DECIDES = {
    "data": (
        "train_files val_files train_batch_size gen_batch_size max_prompt_length max_response_length "
        "train_max_samples val_max_samples custom_cls"
    ),
    "actor_rollout_ref.model": "path lora lora_rank lora_alpha lora_adapter_path target_modules",
    ACTOR: (
        "ppo_mini_batch_size ppo_epochs optim use_kl_loss kl_loss_coef kl_loss_type clip_ratio clip_ratio_low "
        "clip_ratio_high clip_ratio_c entropy_coeff loss_agg_mode policy_loss"
    ),
    ROLLOUT: "n temperature top_p top_k multi_turn nnodes n_gpus_per_node",
    f"{ROLLOUT}.agent": "default_agent_loop agent_loop_config_path agent_loop_manager_class",
    "algorithm": (
        "adv_estimator gamma lam use_kl_in_reward kl_ctrl kl_penalty norm_adv_by_std_in_grpo filter_groups "
        "rollout_correction advantage_mode info_gain_norm_mode turn_signal"
    ),
    "reward": "custom_reward_function reward_manager reward_kwargs reward_model sandbox_fusion",
    "trainer": "n_gpus_per_node nnodes device total_epochs total_training_steps",
    "search": "url max_searches",
    "environment": "path kwargs max_steps action list_actions invalid invalid_reward outcome success_at",
}
_NAMES = {f"{section}.{name}": "" for section, names in _DECIDES.items() for name in names.split()}
_NAMES |= dict.fromkeys(ASYNC, "")
_SEVERAL = re.compile(
    r"(^|\.)(agents?|agent_proxy|multi_turn|rollout_manager|es_manager|env|environment|tools?|interaction|retriever)\."
    r"|(^|[._])(max|num)_(\w+_)?(turns?|llm_calls\w*|tool_calls?|iterations?)$"
    r"|(^|\.)(interaction_config_path|tool_server_url|search_url|search_engine|do_search|max_obs_length|max_start_length)$"
)
_ONE_TURN = re.compile(
    r"agent\.(num_workers|custom_async_server)\b|multi_turn\.enable$|^environment\.(processes|deadline_s|start_s)$"
)
_REWARDS = re.compile(r"(reward|penalty|(^|[._])score)(?!\w*_coef$)")
_OFF = ("", "null", "none", "false", "0", "0.0", "single_turn_agent")


def decides(key: str, text: str = "?") -> bool:
    """Does the key decide what is trained? With its value: no where that switches something off."""
    if text.lower() in _OFF or (text == "1" and means_turns(key)):
        return False
    return bool(longest(_NAMES, renamed(key) or key) or means_turns(key) or _REWARDS.search(key))


def means_turns(key: str) -> bool:
    """Does a key, of whichever project, have a meaning only where a rollout has several turns?"""
    return bool(_SEVERAL.search(key)) and not _ONE_TURN.search(key)


def closes(key: str, read: bool) -> tuple[str, ...]:
    """The keys of which one closes the gap of a lost key. ``read``: something here reads the key, and so itself does."""
    now = renamed(key) or key
    if read:
        return (now, LISTED) if now == DEFAULT else (now,)
    if key in ASYNC:
        return (ASYNC[key],)
    if means_turns(key):
        return TURNS
    return REWARD if _REWARDS.search(key) else (now,)
