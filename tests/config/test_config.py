"""Mistakes in a configuration end before Ray starts and name what would be right."""

import pytest
from omegaconf import OmegaConf

from kit.recipes import OWN, check
from verl_credit.config.compose import load_config, shipped_recipes
from verl_credit.config.keys import OURS, Algorithm, PolicyLoss, defaults_tree, our_keys, read_section
from verl_credit.config.rules import validate
from verl_credit.config.settings import CreditSettings
from verl_credit.credit import INFO_GAIN_NORM_MODES
from verl_credit.errors import ConfigError

LOSS = "actor_rollout_ref.actor.policy_loss"


def test_every_shipped_recipe_composes_and_is_valid():
    assert {"lab", "search_cpu"} <= set(shipped_recipes())
    for recipe in shipped_recipes():
        check(*([] if recipe == "lab" else OWN), recipe=recipe)


def test_our_defaults_are_the_declared_ones():
    settings = CreditSettings.from_config(check(*OWN, recipe="search_cpu"))
    assert settings.algorithm == Algorithm()
    assert settings.loss == PolicyLoss(dynamic_clip=True)  # auto, decided
    assert settings.attention == "auto"
    published = {
        "adv_estimator": "info_gain", "info_gain_norm_mode": "turn-group-v1d", "info_gain_type": "prob_diff",
        "info_gain_first_turn": "prior", "info_gain_context": "observation", "info_gain_template": "auto",
        "info_gain_on_error": "raise", "gamma": 1.0, "adv_rescale_alpha": 0.3, "norm_adv_by_std_in_grpo": True,
        "info_gain_scorer": "branch", "info_gain_aliases": "max", "info_gain_every": 1, "info_gain_warmup_steps": 0,
    }  # fmt: skip
    assert {name: getattr(settings.algorithm, name) for name in published} == published
    curriculum = settings.algorithm.info_gain_curriculum
    assert (curriculum.gain, curriculum.outcome) == ((1.0, 1.0), (1.0, 1.0))
    assert (settings.ratio_level, settings.dynamic_clip, settings.clip_beta) == ("turn", True, 0.3)


def test_every_declared_key_has_a_sentence_and_a_default_that_it_accepts():
    for key in our_keys():
        assert key.field.description, key.name
    tree = OmegaConf.create(defaults_tree() | {"run_dir": "x"})
    for section in OURS:
        read_section(section, tree)


@pytest.mark.parametrize("mode", INFO_GAIN_NORM_MODES)
def test_every_mode_is_an_override_without_plus(mode):
    dynamic = str(mode in ("turn-group-v1d", "turn-group-unbiased")).lower()
    config = check(f"algorithm.info_gain_norm_mode={mode}", f"{LOSS}.dynamic_clip={dynamic}")
    assert CreditSettings.from_config(config).algorithm.info_gain_norm_mode == mode


@pytest.mark.parametrize(
    "override, said",
    [
        ("algorithm.info_gain_nrom_mode=joint", "Did you mean algorithm.info_gain_norm_mode"),
        ("serach.topk=3", "unknown key serach.topk"),
        (f"{LOSS}.dynamic_clp=true", f"Did you mean {LOSS}.dynamic_clip"),
        ("algorithm.info_gain_norm_mode=turn-grup", "did you mean turn-group?"),
        ("algorithm.info_gain_type=diff", "accepted are prob_diff, log_prob_diff"),
        ("algorithm.info_gain_first_turn=zero", "accepted are prior, none"),
        ("algorithm.info_gain_context=page", "accepted are observation, call"),
        ("algorithm.info_gain_on_error=ignore", "accepted are raise, zero"),
        ("algorithm.gamma=1.5", "from 0 to 1"),
        ("algorithm.gamma=high", "expected a number"),
        ("algorithm.norm_adv_by_std_in_grpo=1", "expected true or false"),
        (f"{LOSS}.ratio_level=word", "accepted are token, turn, sequence"),
        (f"{LOSS}.clip_beta=2", "from 0 to 1"),
        ("search.topk=0", "search.topk=0"),
        ("search.topk=1.5", "a whole number"),
        ("seed=-1", "seed=-1"),
        ("evaluation.modes=[beam]", "evaluation.modes"),
        ("algorithm.info_gain_template=x", "must contain {answer}"),
        ("algorithm.info_gain_prefix='{answer}'", "expected the text between a context and"),
        ("algorithm.info_gain_prefix=null", "expected the text between a context and"),
        ("algorithm.info_gain_prefix='<answer>'", "would be written twice"),
        ("trainer.v1.trainer_mode=sync", "accepted are credit"),
        ("actor_rollout_ref.rollout.n=1", "groups of at least 2"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=5", "not a multiple"),
        ("data.max_response_length=100", "cannot hold search.max_searches+1=5 turns"),
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=400", "cannot hold a row"),
        (f"{LOSS}.dynamic_clip=perhaps", "dynamic_clip='perhaps': expected true or false"),
        ("run_dir=${nothing}", "nothing"),
        ("lab.size=huge", "accepted are full, tiny"),
        ("algorithm.info_gain_norm_mode=null", "accepted are none, joint"),
        ("reward.custom_reward_function.reward_kwargs.format_penalti=1", "Did you mean"),
    ],
)
def test_mistakes_are_named(override, said):
    with pytest.raises(ConfigError) as error:
        check(override)
    assert said in str(error.value)


@pytest.mark.parametrize(
    "key",
    [
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "actor_rollout_ref.actor.ppo_epochs",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
        "actor_rollout_ref.rollout.temperature",
        "actor_rollout_ref.rollout.top_p",
        "actor_rollout_ref.rollout.gpu_memory_utilization",
        "data.max_prompt_length",
        "data.max_response_length",
        "trainer.nnodes",
        "trainer.n_gpus_per_node",
        "trainer.total_training_steps",
        "trainer.max_actor_ckpt_to_keep",
    ],
)
def test_what_we_divide_by_or_compare_is_a_number_in_its_range(key):
    """verl's own keys; a traceback of ours would name neither key nor value."""
    for value in ("0", "-1", "abc", "true", "[]"):
        with pytest.raises(ConfigError, match=f"^{key}="):
            check(f"{key}={value}")


def test_a_number_that_verl_lets_be_absent_may_be():
    check("trainer.total_training_steps=null", "trainer.max_actor_ckpt_to_keep=null")
    with pytest.raises(ConfigError, match="trainer.total_training_steps=0: expected .* or null"):
        check("trainer.total_training_steps=0")
    with pytest.raises(ConfigError, match="trainer.save_freq=None: expected a whole number of at least -1"):
        check("trainer.save_freq=null")


@pytest.mark.parametrize(
    "override, said",
    [
        ("run_dir=7", "run_dir=7: expected a folder's name"),
        ("trainer.default_local_dir=null", "trainer.default_local_dir=None"),
        ("evaluation.modes=1", "evaluation.modes=1"),
        ("hardware=null", "hardware=null"),
    ],
)
def test_a_value_of_another_kind_is_named(override, said):
    with pytest.raises(ConfigError, match=said):
        check(override)


def test_the_banner_says_whose_advantages_they_are():
    assert "advantage=turn-group-v1d" in CreditSettings.from_config(check()).banner()
    grpo = check("algorithm.adv_estimator=grpo", f"{LOSS}.dynamic_clip=false")
    banner = CreditSettings.from_config(grpo).banner()
    assert "advantage=verl grpo" in banner and "gain" not in banner
    assert not CreditSettings.from_config(grpo).scores_gain


def test_unknown_recipe_lists_the_shipped_ones():
    with pytest.raises(ConfigError, match="shipped: lab"):
        check(recipe="labb")


def test_a_required_value_that_is_missing_is_named():
    with pytest.raises(ConfigError, match="run_dir"):
        config = load_config("lab", [])
        config.run_dir = "???"
        validate(config)


def test_one_seed_drives_data_rollout_and_actor():
    config = OmegaConf.to_container(check("seed=7"), resolve=True)
    actor = config["actor_rollout_ref"]["actor"]
    assert config["data"]["seed"] == config["actor_rollout_ref"]["rollout"]["seed"] == 7
    assert actor["data_loader_seed"] == actor["fsdp_config"]["seed"] == 7


def test_own_recipe_from_a_folder(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "hydra: {searchpath: [pkg://verl.trainer.config, pkg://verl_credit_recipes]}\n"
        "defaults: [ppo_trainer, credit_defaults, {hardware: laptop}, _self_]\nrun_dir: here\n"
    )
    assert load_config("mine", [], str(tmp_path)).run_dir == "here"
    with pytest.raises(ConfigError, match="is not a directory"):
        load_config("mine", [], str(tmp_path / "nowhere"))


ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"


@pytest.mark.parametrize(
    "overrides, said",
    [
        (["algorithm.info_gain_scorer=forward"], "accepted are branch, rows"),
        ([f"{ATTENTION}=sdpa"], "info_gain_scorer=branch with .*=sdpa.*set .*=auto, or .*=rows"),
        (
            ["actor_rollout_ref.model.use_remove_padding=false"],
            "serves packed rows: set .*use_remove_padding=true",
        ),
        *(
            (
                [f"actor_rollout_ref.{role}.{key}=2"],
                f"actor_rollout_ref.{role}.{key}=2: attention over several ranks",
            )
            for role in ("actor", "ref")
            for key in ("ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size")
        ),
        (
            ["actor_rollout_ref.actor.strategy=megatron"],
            "strategy=megatron: built for and tested with verl's FSDP engine, whichever .* use fsdp2 or fsdp",
        ),
        (
            [
                "actor_rollout_ref.actor.strategy=megatron",
                "algorithm.info_gain_scorer=rows",
                f"{ATTENTION}=flash_attention_2",
            ],
            "strategy=megatron: built for and tested with verl's FSDP",
        ),
        (["actor_rollout_ref.rollout.name=sglang"], "rollout.name=sglang: .* tested with hf and vllm"),
        (
            ["actor_rollout_ref.rollout.name=trtllm", "algorithm.info_gain_scorer=server"],
            "rollout.name=trtllm",
        ),
        (
            ["actor_rollout_ref.rollout.enable_rollout_routing_replay=true"],
            "enable_rollout_routing_replay=true: verl's FSDP engine replays no routes",
        ),
        (
            ["algorithm.rollout_correction.bypass_mode=true"],
            "bypass_mode=true: answers ride on the old_log_probs",
        ),
        (["actor_rollout_ref.model.use_fused_kernels=true"], "use_fused_kernels=true: .* rows' places"),
        (["algorithm.info_gain_aliases=all"], "accepted are max, mean, first"),
        (["algorithm.info_gain_every=0"], "info_gain_every=0: expected a whole number of at least 1"),
        (
            ["algorithm.info_gain_curriculum.gain=[1]"],
            r"curriculum.gain=\[1\]: expected \[first step, last step\]",
        ),
        (["algorithm.info_gain_curriculum.outcome=[0.5, -1]"], "curriculum.outcome=.*at least 0"),
        (
            [
                "algorithm.info_gain_norm_mode=turn-group",
                f"{LOSS}.dynamic_clip=false",
                "algorithm.info_gain_curriculum.gain=[1, 0.5]",
            ],
            "info_gain_norm_mode=turn-group: that mode normalises gains and outcome together",
        ),
    ],
)
def test_what_a_scorer_cannot_do_is_refused_with_the_reason(overrides, said):
    with pytest.raises(ConfigError, match=said):
        check(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.info_gain_scorer=rows", f"{ATTENTION}=sdpa"],
        [
            "algorithm.info_gain_scorer=rows",
            f"{ATTENTION}=sdpa",
            "actor_rollout_ref.model.use_fused_kernels=true",
        ],
        ["credit=grpo", f"{ATTENTION}=sdpa"],  # nothing is scored
        ["algorithm.info_gain_template=auto"],
        ["algorithm.info_gain_prefix='So: '"],
    ],
)
def test_what_rows_can_do_is_not_refused(overrides):
    check(*overrides)


THOUGHT = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    "overrides, template, prefix",
    [
        ([], "auto", THOUGHT),
        (["model=qwen3_4b_instruct"], "auto", ""),
        (["credit=released"], "<answer>{answer}</answer>", THOUGHT),
        (["credit=paper"], "auto", THOUGHT),
    ],
)
def test_who_thinks_first_has_a_prefix_and_released_code_writes_the_tag(overrides, template, prefix):
    settings = CreditSettings.from_config(check(*OWN[:2], OWN[3], *overrides, recipe="singlehop_qwen3_4b"))
    assert (settings.algorithm.info_gain_template, settings.algorithm.info_gain_prefix) == (template, prefix)


def test_the_released_preset_leaves_the_lab_its_tag():
    assert check("credit=released").algorithm.info_gain_template == check().algorithm.info_gain_template


def test_gains_are_measured_when_the_settings_say_so():
    settings = CreditSettings.from_config(
        check("algorithm.info_gain_every=3", "algorithm.info_gain_warmup_steps=2")
    )
    assert [step for step in range(1, 13) if settings.scores_at(step)] == [3, 6, 9, 12]
    assert not CreditSettings.from_config(check("credit=grpo")).scores_at(1)


def test_a_curriculum_is_linear_from_the_first_step_to_the_last():
    settings = CreditSettings.from_config(
        check(
            "algorithm.info_gain_curriculum.gain=[1.0, 0.5]",
            "algorithm.info_gain_curriculum.outcome=[0.5, 1.0]",
        )
    )
    assert settings.curriculum_at(1, 11) == (1.0, 0.5)
    assert settings.curriculum_at(6, 11) == (0.75, 0.75)
    assert settings.curriculum_at(11, 11) == (0.5, 1.0)


def test_a_curriculum_begins_behind_the_warm_up_and_leaves_other_steps_alone():
    weights = ["algorithm.info_gain_curriculum.gain=[0, 1]", "algorithm.info_gain_curriculum.outcome=[0, 1]"]
    settings = CreditSettings.from_config(
        check(*weights, "algorithm.info_gain_warmup_steps=2", "algorithm.info_gain_every=2")
    )
    assert [settings.curriculum_at(step, 7)[1] for step in range(1, 8)] == [1, 1, 0, 1, 0.5, 1, 1]


@pytest.mark.parametrize(
    "override, said",
    [
        (
            "algorithm.info_gain_norm_mode=joint",
            "only turn-group-v1d and turn-group-unbiased give turns a clip scale",
        ),
        ("algorithm.adv_estimator=grpo", "dynamic_clip=true with algorithm.adv_estimator=grpo"),
    ],
)
def test_a_clip_that_is_asked_for_and_has_no_scale_is_refused_and_auto_is_off(override, said):
    with pytest.raises(ConfigError, match=said):
        check(override, f"{LOSS}.dynamic_clip=true")
    assert check(override).actor_rollout_ref.actor.policy_loss.dynamic_clip is False
    assert check().actor_rollout_ref.actor.policy_loss.dynamic_clip is True
