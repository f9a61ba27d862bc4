"""A key that nothing knows is refused, from wherever it came; what is handed to others as it is gets its line."""

from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from kit.idle import idle_lines
from kit.recipes import OWN, check, load_config, refused
from verl_credit.config.keys import place_of
from verl_credit.errors import ConfigError
from verl_credit.recipe.recipe_files import recipes_folder, verl_folder
from verl_credit.recipe.rules import validate
from verl_credit.recipe.rules.known import READ_BY_VERL, handed_on, known_keys

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
REWARD = "reward.custom_reward_function"


def refused_file(folder, text, overrides=(), **files):
    """The refusal of a recipe of the user's."""
    for name, content in {**files, "typo": text}.items():
        (folder / f"{name}.yaml").write_text(content)
    with pytest.raises(ConfigError) as caught:
        validate(load_config("typo", overrides, str(folder)))
    return caught.value


MISTYPED = [  # (what stands in the file, the key, the key that it was taken for)
    ("seeed: 7", "seeed", "seed"),
    ("saerch: {topk: 9}", "saerch", "search"),
    ("algorithm: {info_gain_norm_mod: separate}", "algorithm.info_gain_norm_mod", "algorithm.info_gain_norm_mode"),
    ("algorithm: {gama: 0.5}", "algorithm.gama", "algorithm.gamma"),
    ("algorithm: {gtpo: {bta: 0.5}}", "algorithm.gtpo.bta", "algorithm.gtpo.beta"),
    ("trainer: {total_epoch: 3}", "trainer.total_epoch", "trainer.total_epochs"),
    ("actor_rollout_ref: {actor: {optim: {lrr: 1}}}", f"{ACTOR}.optim.lrr", f"{ACTOR}.optim.lr"),
    ("actor_rollout_ref: {actor: {policy_loss: {clip_bta: 1}}}", f"{ACTOR}.policy_loss.clip_bta",
     f"{ACTOR}.policy_loss.clip_beta"),
    ("reward: {custom_reward_function: {reward_kwargs: {format_penalti: 1}}}", f"{REWARD}.reward_kwargs.format_penalti",
     f"{REWARD}.reward_kwargs.format_penalty"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("line, key, meant", MISTYPED)
def test_a_mistyped_key_in_a_file_is_refused(line, key, meant, tmp_path):
    copied = (recipes_folder() / "search_cpu.yaml").read_text()
    error = refused_file(tmp_path, f"defaults: [mine, _self_]\n{line}\n", OWN, mine=copied)
    assert error.key == key and meant.rpartition(".")[2] in error.accepted
    assert f"unknown key {key} (did you mean {meant}?)" in str(error)


@pytest.mark.parametrize(
    "override", ["+algorithm.info_gain_norm_mod=separate", "+seeed=7", f"+{ROLLOUT}.temprature=1", "+data.extra=1"]
)  # fmt: skip
def test_a_mistyped_key_that_is_added_is_refused(override):
    assert refused(override).key == override.strip("+").partition("=")[0]


MISPLACED = [  # (a file's line, the key, where it belongs)
    ("topk: 9", "topk", "search.topk"),
    ("algorithm: {topk: 9}", "algorithm.topk", "search.topk"),
    ("gtpo: {beta: 0.2}", "gtpo", "algorithm.gtpo"),
    ("data: {ppo_mini_batch_size: 4}", "data.ppo_mini_batch_size", f"{ACTOR}.ppo_mini_batch_size"),
    ("search: {seed: 4}", "search.seed", "seed"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("line, key, place", MISPLACED)
def test_a_key_in_the_wrong_section_gets_the_place_where_it_belongs(line, key, place, tmp_path):
    error = refused_file(tmp_path, f"defaults: [lab, _self_]\n{line}\n")
    assert error.key == key and f"unknown key {key} (did you mean {place}?)" in str(error)


def test_an_override_in_the_wrong_section_gets_its_place_too():
    for key in ("topk", "algorithm.topk"):
        error = refused(f"{key}=9")
        assert (error.key, str(error.value)) == (key, "9") and "(did you mean search.topk?)" in str(error)


def test_a_name_that_several_sections_have_gets_no_place():
    assert place_of("ulysses_sequence_parallel_size") is None and place_of("nothing") is None


SECRETS = [  # (override, what is shown of it)
    ("search.token=s3cret", "search.token=*** (did you mean search.token_env?)"),
    ("search.api_key=s3cret", "search.api_key=***"),
    ("trainer.wandb.Password=s3cret", "trainer.wandb.Password=***"),
    ("client_secret=s3cret", "client_secret=***"),
    ("search.urll=http://me:s3cret@host", "search.urll=http://***@host (did you mean search.url?)"),
    ("search.max_new_tokns=7", "search.max_new_tokns=7 (did you mean search.max_new_tokens?)"),
]  # fmt: skip


@pytest.mark.parametrize("override, shown", SECRETS)
def test_the_value_of_an_unknown_key_that_names_a_secret_is_not_shown(override, shown):
    error = refused(override)
    assert f"unknown key {shown}" in str(error) and "s3cret" not in f"{error} {vars(error)}"


# what verl's own code takes: keys of its classes that its configuration does not list, engines other than FSDP,
# mappings that it hands on, and sections that classes of the user's read
OTHERS = [
    ["+algorithm.gdpo_reward_keys=[a]"],
    [f"+{ROLLOUT}.enable_sleep_mode=true"],
    ["+actor_rollout_ref.actor.checkpoint.save_lora_only=true"],
    ["+actor_rollout_ref.actor.optim.grad_clip=1"],
    ["+search_cpu.mine=3", "seed=${search_cpu.mine}"],  # read by another key
    ["+ray_kwargs.ray_init.address=first:6379"],
    ["+data.cache_dir=x"],
    ["+data.apply_chat_template_kwargs.enable_thinking=false"],
    [f"+{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls=x"],
    ["+hardware.memory_gib=3", "+plan.mean_turns=3"],
]


@pytest.mark.parametrize("overrides", OTHERS, ids=lambda keys: keys[0])
def test_keys_that_verl_or_we_read_are_accepted_without_a_word(overrides):
    assert handed_on(check(*overrides)) == []


HANDED_ON = [
    ["+actor_rollout_ref.model.override_config.attn_implementaton=sdpa"],
    ["+data.mm_processor_kwargs.max_pixels=3"],
    [f"+{ROLLOUT}.engine_kwargs.vllm.max_num_batched_tokens=3"],
    ["+data.extra=1", f"data.custom_cls.path={__file__}"],
]


@pytest.mark.parametrize("overrides", HANDED_ON, ids=lambda keys: keys[0])
def test_keys_below_open_mappings_that_nothing_here_reads_get_their_line(overrides):
    key = overrides[0].strip("+").partition("=")[0]
    config = check(*overrides)
    assert handed_on(config) == [key]
    assert f"handed on as they are, and nothing here reads them: {key}" in idle_lines(config)


def test_a_reward_function_of_ones_own_takes_any_key():
    assert handed_on(check(f"{REWARD}.path={__file__}", f"+{REWARD}.reward_kwargs.scale=2")) == []


@pytest.mark.slow
def test_the_known_keys_are_those_that_verl_composes():
    """verl ships what it composes as one file; the two are compared here."""
    known = known_keys("dp")

    def walk(prefix, node):
        for key in node:
            assert key in known.names[prefix], (prefix, key)
            value = node._get_node(key)
            if OmegaConf.is_dict(value) and not value._is_none() and len(value):
                walk(f"{prefix}.{key}" if prefix else key, value)

    walk("", load_config("ppo_trainer", [], str(verl_folder())))
    assert "actor_rollout_ref.model.override_config" in known.open
    assert "megatron" in known_keys("megatron").names["actor_rollout_ref.actor"]
    assert "megatron" not in known.names["actor_rollout_ref.actor"]


def test_what_is_said_to_be_read_by_verl_stands_in_its_code():
    sources = [path.read_text() for path in Path(verl_folder().parents[1]).rglob("*.py")]
    for key in READ_BY_VERL:
        assert any(f'get("{key.rpartition(".")[2]}"' in source for source in sources), key


@pytest.mark.slow
def test_a_key_that_only_other_hardware_has_is_not_offered_again():
    given = ("hardware=h100x1", "ray_kwargs.ray_init.object_store_memory=9")
    assert "object_store_memory" not in refused(*given, recipe="real_math_cpu").accepted


def test_a_key_that_no_file_system_takes_as_a_name_is_unknown():
    """A key may be a group, which is a folder."""
    assert refused(f"{'x' * 300}=1").key == "x" * 300


@pytest.mark.parametrize(
    "given, now",
    [
        ("custom_reward_function.path=mine.py", "reward.custom_reward_function.path"),
        ("custom_reward_function.name=score", "reward.custom_reward_function.name"),
        ("sandbox_fusion.url=http://x", "reward.sandbox_fusion.url"),
        ("reward_model.reward_manager=dapo", "reward.reward_manager.name"),
        ("reward_model.reward_loop_source=importlib", "reward.reward_manager.source"),
        ("reward_model.reward_loop_module_path=m.py", "reward.reward_manager.module.path"),
        ("reward_model.num_workers=2", "reward.num_workers"),
        ("reward_model.enable=true", "reward.reward_model.enable"),
        ("reward_model.model.path=/m", "reward.reward_model.model_path"),
        ("reward_model.rollout.name=vllm", "reward.reward_model.rollout.name"),
        ("+reward_model.reward_kwargs.overlong_buffer_cfg.enable=true", "reward.reward_kwargs.overlong_buffer_cfg.enable"),
    ],
)  # fmt: skip
def test_a_key_of_an_older_verl_is_refused_with_its_place_now(given, now):
    """verl composes them, and its v1 trainer does not move them: one's own reward would not be used."""
    error = refused(given)
    assert (error.key, error.meant) == (given.lstrip("+").partition("=")[0], now) and now in error.accepted
    tree = yaml.safe_load((verl_folder() / "_generated_ppo_trainer.yaml").read_text())
    for part in now.split(".") if "reward_kwargs" not in now else ():
        tree = tree[part]  # the place is a key of this verl


@pytest.mark.parametrize(
    "given", ["tool_response_truncate_side=sideways", "max_tool_response_length=0", "max_parallel_calls=0"]
)
def test_the_sides_and_sizes_of_what_a_tool_returns_are_checked(given):
    error = refused(f"{ROLLOUT}.multi_turn.{given}")
    assert f"{error.key}={error.value}" == f"{ROLLOUT}.multi_turn.{given}"
