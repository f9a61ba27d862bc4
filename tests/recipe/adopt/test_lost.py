"""What decides a run and is lost ends with exit code 3 and its name; a key beside the launch closes the gap."""

import sys

import pytest
import torch
import yaml

from kit.recipes import composed_once
from verl_credit import credit
from verl_credit.cli import main
from verl_credit.cli.recipe.adopt import remedies
from verl_credit.config.resolved import select
from verl_credit.errors import ConfigError, ExitCode
from verl_credit.recipe import compose
from verl_credit.recipe.adopt.marks import Reason
from verl_credit.recipe.adopt.translate import RECIPE, adopt
from verl_credit.recipe.unread import CHARACTERS

A, ACTOR, R = "algorithm", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MINI = f"{ACTOR}.ppo_mini_batch_size"
ESTIMATOR = f"{A}.adv_estimator=grpo"
MICRO = f"{ACTOR}.ppo_micro_batch_size_per_gpu=1"
BASE = [
    ESTIMATOR, "data.train_files=a.parquet", "data.val_files=b.parquet", "data.train_batch_size=64",
    f"{MINI}=32", MICRO, f"{R}.log_prob_micro_batch_size_per_gpu=1", f"{R}.n=4",
    "actor_rollout_ref.model.path=here/model", "trainer.n_gpus_per_node=1",
]  # fmt: skip
TOOLS = f"{R}.multi_turn.tool_config_path"
MOST = f"{R}.multi_turn.max_assistant_turns"
LISTED = f"{R}.agent.agent_loop_config_path"
DEFAULT = f"{R}.agent.default_agent_loop"
OWN_REWARD = "custom_reward_function.path=mine.py"


@pytest.fixture(autouse=True)
def once(monkeypatch, tmp_path):
    monkeypatch.setattr(compose, "compose_recipe", composed_once)
    for name in ("t.yaml", "mine.py"):
        (tmp_path / name).touch()
    for name, loops in (("one.yaml", ["my_loop"]), ("two.yaml", ["my_loop", "other"])):
        (tmp_path / name).write_text(yaml.safe_dump([{"name": loop, "_target_": "m.Loop"} for loop in loops]))
    monkeypatch.chdir(tmp_path)


def pairs(*overrides):
    return [tuple(one.partition("=")[::2]) for one in (*BASE, *overrides)]


def adopted(*overrides, entry="verl.trainer.main_ppo", unknown=(), beside=()):
    chosen = {one.partition("=")[0] for one in beside}
    return adopt(pairs(*overrides, *beside), entry, {f"{key}=": "line 2" for key in unknown}, chosen)


def config_of(adoption):
    return compose.load_config(RECIPE, adoption.overrides())


def reasons(adoption):
    return {change.old.partition("=")[0]: change.why for change in adoption.dropped}


LOST = [  # the launch's keys, what is lost, what closes the gap
    (["env.env_name=sokoban", "env.max_steps=50"], "env.env_name", f"{TOOLS}=t.yaml"),
    (["env.max_steps=50"], "env.max_steps", f"{TOOLS}=t.yaml"),
    ([f"{DEFAULT}=tool_agent", f"{MOST}=4"], DEFAULT, f"{TOOLS}=t.yaml"),
    (["actor_rollout_ref.agent.max_turns=5"], TOOLS, f"{TOOLS}=t.yaml"),
    (["agent.tool_use=True"], "agent.tool_use", f"{TOOLS}=t.yaml"),
    ([f"{MOST}=5"], TOOLS, f"{TOOLS}=t.yaml"),
    (["rollout_manager.max_turns=5"], TOOLS, f"{TOOLS}=t.yaml"),
    ([f"{R}.name=vllm_with_search"], f"{R}.name", f"{R}.name=sglang"),
    (["num_llm_calls_available=4"], "num_llm_calls_available", f"{TOOLS}=t.yaml"),
    (["data.max_obs_length=500"], "data.max_obs_length", f"{TOOLS}=t.yaml"),
    (["search_engine=mine", "max_turns=2"], "search_engine", f"{TOOLS}=t.yaml"),
    ([f"{R}.multi_turn.interaction_config_path=i.yaml"], f"{R}.multi_turn.interaction_config_path", f"{TOOLS}=t.yaml"),
    ([f"{R}.mode=sync_with_tool"], f"{R}.mode", None),
    (["reward_model.structure_format_score=0.2"], "reward_model.structure_format_score", OWN_REWARD),
    (["reward_model.reward_manager=mine"], "reward.reward_manager.name", "reward.reward_manager.name=naive"),
    (["trainer.device=npu"], "trainer.device", "trainer.device=cuda"),
    ([f"{A}.adv_estimator=gae"], f"{A}.adv_estimator", ESTIMATOR),
    ([f"{A}.adv_estimator=reinforce_plus_plus"], f"{A}.adv_estimator", ESTIMATOR),
    (["data.train_batch_siez=8"], "data.train_batch_siez", None),
    ([f"{ACTOR}.policy_loss=mine"], f"{ACTOR}.policy_loss", None),
    ([f"{LISTED}=two.yaml", f"{MOST}=8"], DEFAULT, f"{DEFAULT}=other"),
]  # fmt: skip


@pytest.mark.parametrize("keys, lost, closes", LOST)
def test_what_decides_and_is_dropped_is_lost_until_a_key_beside_the_launch_closes_the_gap(keys, lost, closes):
    adoption = adopted(*keys)
    assert adoption.lost.get(lost)
    config_of(adoption)  # the rest is a recipe that explain accepts
    if closes:
        assert lost not in adopted(*keys, beside=[closes]).lost


KWARG, OWN_DATA = "custom_reward_function.reward_kwargs.format_score", "data.train_of_mine"


@pytest.mark.parametrize(
    "own, key, place",
    [
        (OWN_REWARD, KWARG, f"reward.{KWARG}"),
        ("data.custom_cls.path=mine.py", OWN_DATA, OWN_DATA),
        ("data.sampler.class_path=mine.py", OWN_DATA, OWN_DATA),
    ],
)
def test_code_of_the_launch_reads_keys_of_its_own(own, key, place):
    adoption = adopted(own, f"{key}=0.1")
    assert not adoption.lost and select(config_of(adoption), place) == 0.1
    ours = f"reward.{OWN_REWARD.partition('=')[0]}=pkg://verl_credit.turns.rollout.reward.qa"
    assert "neither verl" in reasons(adopted(ours, f"{place}=0.1"))[place]


@pytest.mark.parametrize(
    "beside", ["data.train_batch_siez=8", f"{A}.adv_estimator=gae", "reward.reward_manager.name=mine"]
)
def test_a_key_beside_the_launch_that_is_lost_itself_closes_no_gap(beside):
    assert adopted(beside=[beside]).lost


UNKNOWN = [
    "data.train_files", "data.train_batch_size", "data.max_response_length", f"{R}.n", f"{ACTOR}.ppo_mini_batch_size",
    f"{ACTOR}.optim.lr", f"{ACTOR}.kl_loss_coef", f"{ACTOR}.clip_ratio_high", "actor_rollout_ref.model.path", TOOLS,
    "trainer.n_gpus_per_node", "trainer.nnodes", ESTIMATOR.partition("=")[0], "reward.custom_reward_function.path",
]  # fmt: skip


@pytest.mark.parametrize("key", UNKNOWN)
def test_what_decides_and_is_not_known_is_lost(key):
    given = [pair for pair in pairs() if pair[0] != key]
    adoption = adopt(given, unknown={f"{key}=": "line 2"})
    assert adoption.lost[key] == "line 2"
    try:
        config_of(adoption)
    except ConfigError as error:
        assert adoption.causes(error)


def test_a_name_of_the_trial_that_is_not_known_is_no_loss():
    assert not adopted(unknown=["trainer.experiment_name", "trainer.project_name", "trainer.save_freq"]).lost


HARMLESS = [
    [f"{MOST}=1"], [f"{R}.multi_turn.enable=False", f"{MOST}=4"], [f"{R}.agent.num_workers=8"], [f"{R}.mode=sync"],
    [f"{DEFAULT}=single_turn_agent"], ["do_search=false", "max_turns=4"], ["reward_model.strategy=fsdp"],
    ["reward_model.launch_reward_fn_async=True"], [f"{ACTOR}.policy_loss=grpo"], [f"{ACTOR}.state_masking=True"],
    [f"{ACTOR}.use_invalid_action_penalty=False", f"{ACTOR}.invalid_action_penalty_coef=0.1"], ["my.key=1"],
]  # fmt: skip


@pytest.mark.parametrize("keys", HARMLESS)
def test_what_decides_nothing_is_no_loss_and_each_key_is_named(keys):
    adoption = adopted(*keys)
    config = config_of(adoption)
    assert not adoption.lost and config.algorithm.info_gain_norm_mode == "none"
    named = {**adoption.given, **reasons(adoption)}
    assert all(one.partition("=")[0] in named for one in keys)


def test_nothing_is_computed_from_a_number_that_is_not_known():
    micro = f"{ACTOR}.ppo_micro_batch_size"
    given = [
        pair
        for pair in pairs(f"{micro}=64")
        if pair[0] not in (MICRO.partition("=")[0], "trainer.n_gpus_per_node")
    ]
    adoption = adopt(given, unknown={"trainer.n_gpus_per_node=": "line 2"})
    assert adoption.given[f"{micro}_per_gpu"] == "1"
    given += [("max_turns", "2")]
    assert (
        "data.max_response_length" not in adopt(given, unknown={"data.max_response_length=": "line 2"}).given
    )


def test_the_rows_name_the_only_agent_loop_of_a_file():
    adoption = adopted(f"{LISTED}=one.yaml", f"{MOST}=8")
    config = config_of(adoption)
    assert not adoption.lost
    assert config.actor_rollout_ref.rollout.agent.default_agent_loop == "my_loop"
    assert config.algorithm.info_gain_norm_mode == "turn_gae"
    assert config.actor_rollout_ref.rollout.multi_turn.max_assistant_turns == 8


def test_n_turns_may_each_be_as_long_as_what_is_left():
    config = config_of(adopted(f"{TOOLS}=t.yaml", f"{MOST}=8", "data.max_response_length=2048"))
    assert config.search.max_new_tokens == config.data.max_response_length == 2048
    assert config.actor_rollout_ref.rollout.multi_turn.max_assistant_turns == 8
    with pytest.raises(ConfigError) as caught:
        config_of(adopted(f"{TOOLS}=t.yaml", "search.max_new_tokens=513"))
    assert (caught.value.key, caught.value.accepted) == ("data.max_response_length", "at least 513")


@pytest.mark.parametrize(
    "keys, mini, updates",
    [
        ([f"{R}.n_agent=5", "data.train_batch_size=512", f"{MINI}=256"], "64", "10 updates a step, here 8"),
        (["env.rollout.n=8", f"{MINI}=256"], "32", ""),
        (["agent_grpo.n=4", f"{MINI}=256"], "64", "1 updates a step, here 1"),
        ([f"{MINI}=48"], "32", ""),
        ([f"{MINI}=128"], "64", ""),
    ],
)  # fmt: skip
def test_mini_batches_of_forks_count_rows(keys, mini, updates):
    adoption = adopted(*keys)
    assert adoption.given[MINI] == mini
    (change,) = (change for change in adoption.translated if change.new == f"{MINI}={mini}")
    assert updates in change.why


def test_an_adopted_launch_keeps_the_std_of_its_outcomes():
    """verl's grpo, of outcomes 1, 0, 0, 0: 1.5 and -.5; the population's std would give 1.732 and -.577."""
    outcome_B, none_B_K = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, 0)
    for given in ([f"{A}.info_gain_norm_mode=turn-group-v1d"], [f"{A}.turn_signal=tool_reward"]):
        params = config_of(adopted(f"{TOOLS}=t.yaml", *given)).algorithm.turn_params
        found = credit.turn_credit(outcome_B, none_B_K, none_B_K > 0, torch.zeros(4).long(), **params)
        assert found.outcome_advantage_B.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


@pytest.mark.parametrize(
    "estimator, key, value",
    [
        ("rloo", "advantage_mode", "rloo"),
        ("grpo_leave_one_out", "advantage_mode", "rloo"),
        ("LOO", "advantage_mode", "rloo"),
        ("maxrl", "advantage_mode", "maxrl"),
        ("gigpo", "info_gain_norm_mode", "gigpo"),
        ("igpo", "info_gain_norm_mode", "joint"),
    ],
)
def test_an_estimator_of_another_project_becomes_the_key_that_it_is_here(estimator, key, value):
    adoption = adopted(f"{A}.adv_estimator={estimator}", f"{TOOLS}=t.yaml", f"{A}.turn_signal=tool_reward")
    assert adoption.given[f"{A}.{key}"] == value and not adoption.lost


def test_a_mode_whose_environment_is_gone_is_left_out_with_its_options():
    adoption = adopted(f"{A}.adv_estimator=gigpo", f"{A}.gigpo.mode=mean_norm", "env.env_name=webshop")
    assert config_of(adoption).algorithm.turn_params == {}
    assert {*adoption.lost} == {"env.env_name"}


IN_MINIGRID = [
    f"{DEFAULT}=env_agent",
    "environment.path=minigrid",
    "environment.kwargs.id=MiniGrid-Empty-5x5-v0",
]


def test_a_launch_of_our_own_environments_keeps_its_agent_loop():
    adoption = adopted(*IN_MINIGRID)
    assert not adoption.lost and {DEFAULT, "environment.path"}.isdisjoint(reasons(adoption))
    rollout = config_of(adoption).actor_rollout_ref.rollout
    assert rollout.agent.default_agent_loop == "env_agent"
    assert not any("<answer>GOLD" in note for note in adoption.notes)


def test_an_environment_of_ours_stands_in_for_one_of_a_fork():
    """Three turns of 100 tokens, and 600 characters, 150 tokens, after the first and the second."""
    fork = ["env.env_name=Webshop", "env.max_steps=3", "data.max_response_length=100"]
    dropped = reasons(adopted(*fork))["env.env_name"]
    assert f"{DEFAULT}=env_agent environment.path=" in dropped and "docs/environments.md" in dropped
    adoption = adopted(*fork, beside=[*IN_MINIGRID, "environment.max_chars=600"])
    config = config_of(adoption)
    assert not adoption.lost and config.reward.custom_reward_function.path.endswith("qa")
    assert (config.environment.max_steps, config.search.max_new_tokens) == (3, 100)
    assert config.data.max_response_length == 3 * 100 + 2 * 600 // CHARACTERS
    longer = adopted(*fork, beside=[*IN_MINIGRID, "data.max_response_length=2000"])
    assert config_of(longer).data.max_response_length == 2000


def test_a_history_of_a_fork_is_a_window_whose_lengths_stay():
    """There as here a row is a step: its prompt has the last steps, and its response one turn."""
    fork = [
        "env.env_name=Webshop",
        "env.max_steps=15",
        "env.history_length=2",
        "env.rollout.n=8",
        "env.seed=0",
    ]
    fork += ["data.max_prompt_length=4096", "data.max_response_length=512"]
    adoption = adopted(*fork, beside=IN_MINIGRID)
    config = config_of(adoption)
    assert not adoption.lost and (config.environment.window, config.environment.max_steps) == (2, 15)
    assert (config.data.max_prompt_length, config.data.max_response_length) == (4096, 512)
    assert (config.search.max_new_tokens, config.actor_rollout_ref.rollout.n) == (512, 8)
    assert not {"env.history_length", "env.max_steps"} & {*reasons(adoption)}
    assert config_of(adopted(*fork, beside=[*IN_MINIGRID, "environment.window=0"])).environment.window == 0


@pytest.mark.parametrize(
    "name, path",
    [
        ("FrozenLake-v1", "gymnasium"),
        ("FrozenLake8x8-v1", "gymnasium"),
        ("MiniGrid-DoorKey-5x5-v0", "minigrid"),
    ],
)
def test_an_environment_that_an_adapter_makes_is_translated(name, path):
    adoption = adopted(f"env.env_name={name}", "env.max_steps=9", "env.history_length=0")
    found = config_of(adoption).environment
    assert not adoption.lost and (found.path, found.kwargs.id) == (path, name)
    assert (found.max_steps, found.window) == (9, 0)
    assert any("prepare env" in note and "env.seed + 1000" in note for note in adoption.notes)
    for other in "gym_cards/Blackjack-v0", "alfworld/AlfredTWEnv", "Sokoban":
        assert "env.env_name" in adopted(f"env.env_name={other}").lost


@pytest.mark.parametrize("key, lost", [("environment.path", True), ("environment.processes", False)])
def test_what_decides_an_environment_is_lost_where_it_is_not_known(key, lost):
    assert (key in adopted(*IN_MINIGRID[:1], unknown=[key]).lost) == lost


DROPPED = [
    (f"{R}.mode=sync", "async alone"),
    ("reward_model.strategy=fsdp", "reward.reward_model.strategy"),
    ("reward.reward_kwargs.scale=2", "custom_reward_function.reward_kwargs"),
    ("data.max_start_length=99", "data.max_prompt_length"),
    (f"{ACTOR}.policy_loss=grpo", "loss_mode"),
    ("trainer.device=npu", "CUDA"),
    (f"{R}.multi_turn.interaction_config_path=i.yaml", "an agent loop of your own"),
]


@pytest.mark.parametrize("key, says", DROPPED)
def test_a_key_that_has_no_place_is_dropped_with_the_reason(key, says):
    assert says in reasons(adopted(key))[key.partition("=")[0]]


TRANSLATED = [
    ("actor_rollout_ref.model.lora.rank=32", "actor_rollout_ref.model.lora_rank"),
    ("actor_rollout_ref.model.lora.alpha=16", "actor_rollout_ref.model.lora_alpha"),
    (f"{R}.n_samples=6", f"{R}.n"),
    (f"{R}.agent.max_turns=6", MOST),
    ("trainer.epochs=3", "trainer.total_epochs"),
    ("lr=1e-6", f"{ACTOR}.optim.lr"),
    (f"{ACTOR}.policy_loss=gspo", f"{ACTOR}.policy_loss.loss_mode"),
]


@pytest.mark.parametrize("key, place", TRANSLATED)
def test_a_key_of_another_name_is_translated(key, place):
    assert adopted(key).given[place] == key.partition("=")[2]


@pytest.mark.parametrize(
    "override, key",
    [
        (f"{R}.mode=sync", f"{R}.mode"),
        ("actor_rollout_ref.model.lora.rank=32", "actor_rollout_ref.model.lora.rank"),
        ("+reward_model.launch_reward_fn_async=true", "reward_model.launch_reward_fn_async"),
    ],
)
def test_explain_refuses_what_adopt_would_change(override, key):
    with pytest.raises(ConfigError) as caught:
        compose.load_config(RECIPE, [*adopted().overrides(), override])
    assert caught.value.key == key and "launch_reward_fn_async;" not in str(caught.value)


@pytest.mark.parametrize(
    "entry", ["verl.experimental.one_step_off_policy.main_ppo", "recipe.fully_async_policy.fully_async_main"]
)
def test_an_asynchronous_entry_gets_the_trainer_with_devices_for_rollouts(entry):
    config = config_of(adopted("rollout.nnodes=1", "rollout.n_gpus_per_node=2", entry=entry))
    assert config.trainer.v1.trainer_mode == "credit_separate_async"
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.nnodes, rollout.n_gpus_per_node, rollout.checkpoint_engine.backend) == (1, 2, "nccl")


ASYNC = "recipe.fully_async_policy.fully_async_main"
SYNC, STALE, TOTAL = (
    "async_training.trigger_parameter_sync_step",
    "async_training.staleness_threshold",
    "rollout.total_rollout_steps",
)
BATCH, STEPS = "data.train_batch_size", "trainer.total_training_steps"
AHEAD = "trainer.v1.separate_async.num_warmup_batches"


@pytest.mark.parametrize(
    "unknown, lost, closes",
    [
        (SYNC, {SYNC, BATCH, STEPS}, f"{BATCH}=96"),
        ("async_training.require_batches", {"async_training.require_batches", BATCH, STEPS}, f"{BATCH}=96"),
        (STALE, {STALE}, f"{AHEAD}=1"),
        (TOTAL, {TOTAL}, f"{STEPS}=3"),
    ],
)
def test_the_asynchronous_trainer_computes_nothing_from_what_is_not_known(unknown, lost, closes):
    """BASE's mini-batch of 32, three times before a hand-over; 288 prompts are then three steps."""
    known = {SYNC: "3", STALE: "0.5", TOTAL: "288"}
    given = [f"{key}={text}" for key, text in known.items() if key != unknown]
    adoption = adopted(*given, entry=ASYNC, unknown=[unknown])
    assert {*adoption.lost} == lost and (STEPS in adoption.given) == (unknown == STALE)
    adoption = adopted(*given, entry=ASYNC, unknown=[unknown], beside=[closes])
    key, _, value = closes.partition("=")
    assert not adoption.lost and adoption.given[key] == value
    if unknown != TOTAL:
        assert adoption.given[STEPS] == "3"


def test_a_gap_is_closed_by_todays_key_as_by_the_forks():
    fork = [
        "data.train_batch_size=512",
        f"{MINI}=256",
        "data.max_response_length=500",
        "data.max_obs_length=400",
    ]
    whole = adopted(*fork, f"{R}.n_agent=5", "max_turns=2")
    n = adopted(*fork, "max_turns=2", unknown=[f"{R}.n_agent"], beside=[f"{R}.n=5"])
    turns = adopted(*fork, f"{R}.n_agent=5", unknown=["max_turns"], beside=["search.max_searches=2"])
    assert whole.given[MINI] == "64" and whole.given["data.max_response_length"] == str(3 * 500 + 2 * 400)
    assert whole.given == n.given == turns.given and whole.lost.keys() == n.lost.keys() == turns.lost.keys()
    assert "max_turns" in adopted(*fork, unknown=["max_turns"]).lost


def test_steps_of_an_environment_that_are_not_known_are_lost():
    fork, steps = ["env.env_name=Webshop"], "environment.max_steps"
    assert steps in adopted(*fork, unknown=["env.max_steps"], beside=IN_MINIGRID).lost
    assert not adopted(*fork, unknown=["env.max_steps"], beside=[*IN_MINIGRID, f"{steps}=4"]).lost
    turns = adopted(f"{MOST}=5", beside=IN_MINIGRID)
    assert turns.given[steps] == "5" and MOST not in turns.given


linux = pytest.mark.skipif(sys.platform != "linux", reason="Landlock is Linux's")


@linux
def test_the_last_line_names_what_is_lost_and_a_key_makes_it_whole(capsys, tmp_path):
    launch = " ".join(one for one in BASE if not one.startswith("data.train_files"))
    (tmp_path / "run.sh").write_text(
        f"python -m my.main_dapo {launch} data.train_files=$F trainer.experiment_name=$(date) data.val_files={{b,c}}\n"
    )
    file = tmp_path / "mine.yaml"
    assert main(["adopt", "run.sh", "--write", str(file)]) == 3
    printed = capsys.readouterr().out
    assert file.exists() and "explain accepts it" not in printed
    assert f"{file} is written" in printed.splitlines()[-1]
    assert printed.splitlines()[-1].startswith("partial") and "data.train_files" in printed.splitlines()[-1]
    for words in (
        "the entry point is my.main_dapo",
        "data.val_files is given 3 times",
        "F (line 1) is set neither",
    ):
        assert words in printed
    assert main(["adopt", "--from", "run.sh", "--", "data.train_files=x.parquet"]) == 0
    printed = capsys.readouterr().out
    assert "explain accepts it" in printed.splitlines()[-1] and "F (line 1)" not in printed


def test_a_yaml_of_ones_own_with_verls_name_is_read(capsys, tmp_path):
    (tmp_path / "conf").mkdir()
    own = {"defaults": ["ppo_trainer", "parts", "_self_"], "data": {"shuffle": False}}
    (tmp_path / "conf" / "ppo_trainer.yaml").write_text(yaml.safe_dump(own))
    (tmp_path / "conf" / "parts.yaml").write_text("data: {max_prompt_length: 77}\n")
    options = ["--config-path=conf", "--config-name=ppo_trainer"]
    assert main(["adopt", "--", *options, *BASE]) == 0
    printed = capsys.readouterr().out
    assert "data.shuffle=false" in printed and "data.max_prompt_length=77" in printed
    assert main(["adopt", "--", "--config-name=absent", *BASE]) == 3
    last = capsys.readouterr().out.splitlines()[-1]
    assert "--config-name" in last and "--config FILE" in last and "KEY=VALUE" not in last
    (tmp_path / "conf" / "parts.yaml").unlink()
    assert main(["adopt", "--", *options, *BASE]) == 3


@pytest.mark.parametrize("value", ["1e-6,5e-7", "{x,y}.parquet"])
def test_several_values_of_a_key_are_refused(value, capsys):
    assert main(["adopt", "--write", "new.yaml", "--", *BASE, f"{ACTOR}.optim.lr={value}"]) == 4
    assert f"{ACTOR}.optim.lr={value}" in capsys.readouterr().out


def test_a_file_that_is_there_is_refused_before_the_work(capsys):
    assert main(["adopt", "nowhere.sh", "--write", "one.yaml"]) == 4
    assert "--write=one.yaml" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, why, remedy",
    [
        ("an argument", Reason("line 2", variable="ARGS"), "the value of ARGS in the environment"),
        ("an argument", "line 2", "an argument: correct it in the launch"),
        ("data.train_files=?", "line 2", "KEY=VALUE after --"),
    ],
)
def test_the_remedy_is_one_that_closes_the_gap(name, why, remedy):
    (found,) = remedies(adopt(pairs(), unknown={name: why}))
    assert found.endswith(remedy)


@linux
def test_a_variable_that_nothing_sets_is_the_remedy_of_its_argument(capsys, tmp_path):
    (tmp_path / "run.sh").write_text(f'python -m my.main_dapo {" ".join(BASE)} "$ARGS"\n')
    assert main(["adopt", "run.sh"]) == 3
    assert "; give the value of ARGS in the environment" in capsys.readouterr().out.splitlines()[-1]


GPUS = [
    "trainer.n_gpus_per_node=8",
    "trainer.nnodes=2",
    f"{R}.name=vllm",
    f"{R}.tensor_model_parallel_size=2",
]


@pytest.mark.parametrize(
    "beside, engine, devices",
    [
        (["hardware=laptop"], "hf", ("cpu", 1, 1)),
        (["hardware=laptop", f"{R}.name=vllm", "trainer.n_gpus_per_node=2"], "vllm", ("cpu", 2, 1)),
        (["hardware=node4"], "vllm", ("cuda", 4, 2)),
    ],
)
def test_hardware_beside_the_launch_decides_its_devices_and_their_engine(beside, engine, devices):
    """A key beside it decides more; what a machine leaves open, such as a number of nodes, stays the launch's."""
    adoption = adopted(*GPUS, "trainer.device=cuda", beside=beside)
    config = config_of(adoption)
    assert config.actor_rollout_ref.rollout.name == engine
    assert (config.trainer.device, config.trainer.n_gpus_per_node, config.trainer.nnodes) == devices
    changed = {one.old: one.new for one in adoption.translated if beside[0] in one.why}
    assert (changed.get("trainer.n_gpus_per_node=8") == f"trainer.n_gpus_per_node={devices[1]}") == (
        len(beside) == 1
    )
    assert adopted(*GPUS).given["trainer.n_gpus_per_node"] == "8"
    assert "hardware=absent" in adopted(*GPUS, beside=["hardware=absent"]).overrides()


def test_hardware_beside_the_launch_closes_what_is_not_known_of_devices():
    open_key = "trainer.nnodes"
    assert not adopted(unknown=[open_key], beside=["hardware=laptop"]).lost
    assert open_key in adopted(unknown=[open_key], beside=["hardware=node4"]).lost


def test_an_exit_code_has_no_name_of_another_meaning():
    assert (ExitCode.PARTIAL, ExitCode.DIFFERENT) == (3, 1)
    assert {str(ExitCode.PARTIAL), str(ExitCode.DIFFERENT)} == {"3", "1"}
    assert not {repr(ExitCode.PARTIAL), repr(ExitCode.DIFFERENT)} & {repr(code) for code in ExitCode}


def test_defaults_that_have_moved_are_noted_for_a_launch_of_an_older_verl():
    def notes(*keys):
        return [note for note in adopted(*keys).notes if "older verl" in note]

    assert notes() == [] and notes(f"{A}.gamma=1") == []
    (note,) = notes(OWN_REWARD)
    assert f"{ACTOR}.entropy_coeff was 0.001" in note and f"{A}.use_kl_in_reward" in note
    (note,) = notes(OWN_REWARD, f"{ACTOR}.use_kl_loss=True")
    assert f"{A}.use_kl_in_reward" not in note
    assert notes(OWN_REWARD, f"{ACTOR}.entropy_coeff=0", f"{A}.use_kl_in_reward=False") == []
