"""From a recipe's name and overrides to settings: what Hydra composes, what a mistake there is told, what a run is told."""

import pytest
from omegaconf import OmegaConf

from kit.recipes import OWN, check, composed_once, omegaconfs_copies, refused
from kit.settings import DECIDED, settings
from verl_credit.config.keys import (
    LOSS,
    OURS,
    Algorithm,
    Evaluation,
    Faults,
    PolicyLoss,
    Search,
    defaults_tree,
    keys_of,
    our_keys,
    read_section,
)
from verl_credit.config.settings import CreditSettings
from verl_credit.credit import INFO_GAIN_NORM_MODES
from verl_credit.credit.turn.modes import MODES
from verl_credit.errors import ConfigError
from verl_credit.recipe.compose import compose_recipe, load_config, unchecked_config

MODE = "algorithm.info_gain_norm_mode=turn-group-v1d"


def settings_of(*overrides, recipe="lab"):
    return CreditSettings.from_config(check(*overrides, recipe=recipe))


@pytest.mark.slow
@pytest.mark.parametrize("recipe, preset", [("search_cpu", "grpo"), ("math_sepa", "maxrl_gtpo_sepa")])
def test_what_the_tests_compose_is_what_hydra_composes(recipe, preset):
    overrides = [
        f"credit={preset}", "seed=3", "algorithm.gamma=1e-1", "+algorithm.advantage_params.a=[1,b]", "~search.topk",
        "algorithm.info_gain_prefix='So: '", "run_dir=${hardware.name}/x", "search.index_fingerprint=null",
    ]  # fmt: skip
    with omegaconfs_copies():
        config = compose_recipe(recipe, overrides)
    assert composed_once(recipe, overrides) == config


def test_our_defaults_are_the_declared_ones():
    found = settings_of(*OWN, recipe="search_cpu")
    assert found.algorithm == Algorithm(info_gain_scorer="branch", **DECIDED)  # auto, decided
    assert found.loss == PolicyLoss(dynamic_clip=True)  # auto, decided
    assert found.attention == "auto"
    assert (found.ratio_level, found.dynamic_clip, found.clip_beta) == ("turn", True, 0.3)


@pytest.mark.slow
def test_every_declared_key_has_a_sentence_and_a_default_that_it_accepts_and_a_recipe_has_it():
    config = load_config("search_cpu", [])
    for key in our_keys():
        assert key.sentence, key.name
        assert OmegaConf.select(config, key.name.rpartition(".")[0] or "hardware") is not None
    tree = OmegaConf.create(defaults_tree() | {"run_dir": "x"})
    for section in OURS:
        read_section(section, tree)
        if section in (Search, Faults, Evaluation):  # of ours alone
            assert set(OmegaConf.select(config, section.prefix)) == {key.path[0] for key in keys_of(section)}


@pytest.mark.parametrize("mode", [name for name in INFO_GAIN_NORM_MODES if name != "turn_gae"])
def test_every_mode_is_an_override_without_plus(mode):
    dynamic = str(mode in ("turn-group-v1d", "turn-group-unbiased")).lower()
    found = settings_of(f"algorithm.info_gain_norm_mode={mode}", f"{LOSS}.dynamic_clip={dynamic}")
    assert found.algorithm.info_gain_norm_mode == mode


@pytest.mark.parametrize(
    "override, key, message",
    [
        ("~search.topk", "search.topk", "search.topk is missing: the recipe must list credit_defaults"),
        ("+search.tokn_env=X", "search.tokn_env", "(did you mean search.token_env?): accepted below search"),
        ("algorithm.advantage_params={a: 1}", "algorithm.advantage_params", "+algorithm.advantage_params.NAME=VALUE"),
        ("hardware=null", "defaults", "hardware=null"),
        ("run_dir=${nothing}", "run_dir", "nothing"),
        ("algorithm=3", "algorithm", "algorithm=3"),
    ],
)  # fmt: skip
def test_what_hydra_refuses_or_leaves_out_is_named(override, key, message):
    error = refused(override)
    assert error.key == key and message in str(error)


def test_a_required_value_that_is_missing_is_named():
    assert refused("run_dir='???'").key == "run_dir"


def test_one_seed_drives_data_rollout_and_actor():
    config = OmegaConf.to_container(check("seed=7"), resolve=True)
    actor = config["actor_rollout_ref"]["actor"]
    assert config["data"]["seed"] == config["actor_rollout_ref"]["rollout"]["seed"] == 7
    assert actor["data_loader_seed"] == actor["fsdp_config"]["seed"] == 7


@pytest.mark.slow
def test_own_recipe_from_a_folder(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "hydra: {searchpath: [pkg://verl.trainer.config, pkg://verl_credit_recipes]}\n"
        "defaults: [ppo_trainer, credit_defaults, {hardware: laptop}, _self_]\n"
        "run_dir: here\nsearch: {max_retires: 3}\n"
    )
    assert unchecked_config("mine", OWN, str(tmp_path)).run_dir == "here"
    with pytest.raises(ConfigError) as caught:
        load_config("mine", OWN, str(tmp_path))
    assert caught.value.key == "search.max_retires" and "max_retries" in caught.value.accepted
    assert "did you mean search.max_retries?" in str(caught.value)
    with pytest.raises(ConfigError, match="is not a directory"):
        load_config("mine", [], str(tmp_path / "nowhere"))


@pytest.mark.slow
def test_the_banner_says_whose_advantages_they_are():
    assert "advantage=turn-group-v1d" in settings_of().banner()
    grpo = settings_of("credit=verl").banner()
    assert "advantage=verl grpo" in grpo and "scorer" not in grpo


@pytest.mark.slow
def test_released_code_writes_the_tag_and_the_chat_template_decides_what_precedes_it():
    def template(*overrides):
        found = settings_of(*OWN[:2], OWN[3], *overrides, recipe="multihop_qwen3_4b").algorithm
        return found.info_gain_template, found.info_gain_prefix

    assert template() == template("model=qwen3_4b_instruct") == template("credit=paper") == ("auto", "auto")
    assert template("credit=released") == ("<answer>{answer}</answer>", "auto")
    assert (
        check("credit=released").algorithm.info_gain_template == check().algorithm.info_gain_template
    )  # the lab's


def test_gains_are_measured_when_the_settings_say_so():
    found = settings(info_gain_every=3, info_gain_warmup_steps=2)
    assert [step for step in range(1, 13) if found.scores_at(step)] == [3, 6, 9, 12]
    assert not settings(info_gain_norm_mode="none").scores_at(1)


def test_a_curriculum_is_linear_from_the_first_step_with_gains_to_the_last():
    found = settings(info_gain_curriculum={"gain": (1.0, 0.5), "outcome": (0.5, 1.0)})
    assert [found.curriculum_at(step, 11) for step in (1, 6, 11)] == [(1.0, 0.5), (0.75, 0.75), (0.5, 1.0)]
    weights = {"gain": (0.0, 1.0), "outcome": (0.0, 1.0)}
    found = settings(info_gain_curriculum=weights, info_gain_warmup_steps=2, info_gain_every=2)
    assert [found.curriculum_at(step, 7)[1] for step in range(1, 8)] == [1, 1, 0, 1, 0.5, 1, 1]


@pytest.mark.parametrize("value", [-0.1, 0, 0.99, 1, 2, "nan", "inf"])
@pytest.mark.parametrize(
    "key, option",
    [
        ("actor_rollout_ref.actor.policy_loss.clip_beta", "clip_beta"),
        ("algorithm.adv_rescale_alpha", "alpha"),
    ],
)
def test_a_key_accepts_what_the_turn_mode_accepts(key, option, value):
    """Or a run would end at its first update for a value that the start let through."""
    refused = []
    mode = MODES["turn-group-v1d"]
    for attempt in (
        lambda: mode.check_options({option: float(value)}),
        lambda: check(f"{key}={value}", MODE),
    ):
        try:
            attempt()
            refused.append(False)
        except ValueError:
            refused.append(True)
    assert refused in ([True, True], [False, False])
