"""Ten public launches of verl are adopted: `explain` accepts each, and a table says what each of them loses."""

import pytest
from omegaconf import OmegaConf

from kit import launches
from kit.recipes import composed_once
from verl_credit.recipe import compose
from verl_credit.recipe.adopt.launch_files import read_launch
from verl_credit.recipe.adopt.translate import RECIPE, adopt

LOOPS = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
SP = "ulysses_sequence_parallel_size"
PADDING = {"actor_rollout_ref.model.use_remove_padding"}
RANKS = {f"actor_rollout_ref.actor.{SP}"}
LOST = {
    "search_r1_like": PADDING,
    "gsm8k_tools": PADDING,
    "grpo_qwen3_4b": PADDING,
    "dapo_colocate": PADDING | RANKS | {f"actor_rollout_ref.ref.{SP}", "critic.strategy"},
    "async_retool": PADDING | RANKS | {"critic.strategy", "async_training.partial_rollout"},
    "retool": PADDING | RANKS | {"trainer.device"},
    "tau2": PADDING
    | {
        "actor_rollout_ref.model.override_config.attn_implementation",
        "actor_rollout_ref.model.use_fused_kernels",
        "actor_rollout_ref.model.fused_kernel_options.impl_backend",
        "trainer.use_v1",
    },
    "search_r1": PADDING
    | {
        "actor_rollout_ref.actor.fsdp_config.grad_offload",
        "actor_rollout_ref.actor.state_masking",
        "algorithm.no_think_rl",
    },
    "gigpo_search": PADDING
    | {
        "actor_rollout_ref.actor.use_invalid_action_penalty",
        "actor_rollout_ref.actor.invalid_action_penalty_coef",
        "algorithm.gigpo.enable_similarity",
        "algorithm.gigpo.similarity_thresh",
        "env.history_length",
    },
    "igpo": PADDING
    | RANKS
    | {
        "data.data_writing_path",
        "critic.optim.lr",
        "critic.model.path",
        "critic.ppo_micro_batch_size_per_gpu",
        "algorithm.use_curriculum",
        "algorithm.curriculum_f1_init",
        "algorithm.curriculum_f1_final",
        "algorithm.curriculum_ig_init",
        "algorithm.curriculum_ig_final",
        "search_engine",
        "codeact_env_disabled",
    },
}
"""The keys that have no place here; `adopt` prints each with its reason."""
DECIDE = {
    "retool": {"trainer.device"},
    "gigpo_search": {"actor_rollout_ref.actor.use_invalid_action_penalty"},
    "igpo": {"search_engine", "search.url"},
}
"""What decides the run and is lost: exit code 3."""
TURNS = {  # (turn mode, agent loop, turns at most)
    "search_r1_like": ("turn_gae", "turn_agent", 2),
    "gsm8k_tools": ("turn_gae", "turn_agent", 5),
    "grpo_qwen3_4b": ("none", "search_agent", 1),
    "dapo_colocate": ("none", "search_agent", 1),
    "async_retool": ("turn_gae", "turn_agent", 16),
    "retool": ("turn_gae", "turn_agent", 16),
    "tau2": ("turn_gae", "tau2_agent", 20),
    "search_r1": ("turn_gae", "search_agent", 3),
    "gigpo_search": ("gigpo", "search_agent", 4),
    "igpo": ("joint", "search_agent", 10),
}


@pytest.fixture(autouse=True)
def once(monkeypatch, tmp_path):
    monkeypatch.setattr(compose, "compose_recipe", composed_once)
    monkeypatch.chdir(tmp_path)


def adopted(name, tmp_path):
    launch = launches.read(name)
    given = read_launch(None, launch.config and str(launch.config), launch.overrides)
    pairs = [pair for pair in given.pairs if pair[0] != LOOPS]
    for _, value in pairs:  # the author's files
        if value.endswith((".py", ".yaml", ".json")) and not value.startswith("/"):
            (tmp_path / value).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / value).touch()
    if name == "tau2":
        (tmp_path / "loops.yaml").write_text(
            "- {name: tau2_agent, _target_: tau2_agent_loop.Tau2AgentLoop}\n"
        )
        pairs.append((LOOPS, str(tmp_path / "loops.yaml")))
    return adopt(pairs, launch.entry), dict(given.pairs)


@pytest.mark.parametrize("name", launches.NAMES)
def test_explain_accepts_it_and_the_table_has_what_it_loses(name, tmp_path):
    adoption, _ = adopted(name, tmp_path)
    config = compose.load_config(RECIPE, adoption.overrides())
    assert {change.old.partition("=")[0] for change in adoption.dropped} == LOST[name]
    assert {*adoption.lost} == DECIDE.get(name, set())
    mode, loop, turns = TURNS[name]
    assert config.algorithm.adv_estimator == "info_gain"
    assert config.algorithm.info_gain_norm_mode == mode
    assert config.actor_rollout_ref.rollout.agent.default_agent_loop == loop
    most = config.actor_rollout_ref.rollout.multi_turn.max_assistant_turns
    assert (most if loop.startswith(("turn", "tau2")) else config.search.max_searches + 1) == turns


@pytest.mark.parametrize("name", launches.NAMES)
def test_every_key_is_kept_translated_or_dropped_with_a_reason(name, tmp_path):
    """A key with a value of its own is in the result, or the output names it; nothing vanishes."""
    adoption, given = adopted(name, tmp_path)
    named = " ".join(f"{c.old} {c.new}" for c in (*adoption.translated, *adoption.dropped))
    same = {"trainer.default_hdfs_dir": "null", "trainer.critic_warmup": "0", "data.train_data_num": "null"}
    same |= {"data.val_data_num": "null", "env.env_name": "search", LOOPS: given.get(LOOPS)}
    for key, value in given.items():
        kept = adoption.given.get(key) == value
        assert kept or f"{key}=" in named or same.get(key) == value, key
    assert all(change.why for change in (*adoption.translated, *adoption.dropped))


REWARDS = {
    "retool": "verl-recipe/retool/retool.py",
    "async_retool": "recipe/retool/retool.py",
    **dict.fromkeys(("search_r1", "gigpo_search", "igpo"), "pkg://verl_credit.turns.rollout.reward.qa"),
}


@pytest.mark.parametrize("name", launches.NAMES)
def test_the_reward_is_the_launchs_own(name, tmp_path):
    adoption, _ = adopted(name, tmp_path)
    config = compose.unchecked_config(RECIPE, adoption.overrides())
    assert OmegaConf.select(config, "reward.custom_reward_function.path") == REWARDS.get(name)


def test_the_rows_of_forks_become_prompt_and_dialogue(tmp_path):
    """Search-R1: 2 turns that search and an answer of 500 tokens each, and 2 results of 500."""
    adoption, _ = adopted("search_r1", tmp_path)
    config = compose.load_config(RECIPE, adoption.overrides())
    assert config.data.max_prompt_length == 2048
    assert config.data.max_response_length == 3 * 500 + 2 * 500
    assert (config.search.max_new_tokens, config.search.max_page_chars) == (500, 500 * 4 // 3)
    assert config.search.url == "http://127.0.0.1:8000/retrieve"
    actor = config.actor_rollout_ref.actor
    assert (config.actor_rollout_ref.rollout.n, actor.ppo_micro_batch_size_per_gpu) == (5, 64 // 8)


def test_the_older_asynchronous_trainer_becomes_the_v1_trainer_with_turns(tmp_path):
    adoption, _ = adopted("async_retool", tmp_path)
    config = compose.load_config(RECIPE, adoption.overrides())
    assert config.trainer.v1.trainer_mode == "credit_separate_async"
    assert (config.data.train_batch_size, config.trainer.total_training_steps) == (16 * 4, 64 * 250 // 64)
    assert config.trainer.v1.separate_async.parameter_sync_step == 4
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.nnodes, rollout.n_gpus_per_node, rollout.checkpoint_engine.backend) == (1, 4, "nccl")


def test_gigpo_becomes_the_turn_mode_with_its_options(tmp_path):
    adoption, _ = adopted("gigpo_search", tmp_path)
    algorithm = compose.load_config(RECIPE, adoption.overrides()).algorithm
    assert algorithm.turn_params == {"step_weight": 1.0, "norm": "mean_std_norm"}
    assert algorithm.gamma == 0.95
