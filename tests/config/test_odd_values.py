"""Values that a key cannot mean: refused with the key, the value and what would be right, never a traceback."""

import pytest
import torch
from omegaconf import OmegaConf

from kit.recipes import check, load_config, refused
from verl_credit.config.keys import LOSS
from verl_credit.config.keys.verl import KL_PENALTIES, LOGGERS, TARGET, VERLS_LOSSES
from verl_credit.errors import ConfigError
from verl_credit.recipe.agent_loops import KEYS, LISTED, MULTI_TURN
from verl_credit.recipe.rules import validate
from verl_credit.recipe.rules.engines import CODE

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
OWN = "or a dotted path to your own"
LONG = "x" * 300
TOOL_FILES = [f"{MULTI_TURN}.{key}" for key in KEYS]
# fmt: off
REFUSED = [  # (key, value as it is written, what is accepted); names, ranges and switches: test_refusals, for every key
    ("algorithm.uncertainty_kind", "[a]", OWN),
    ("algorithm.transform_mode", "{a:1}", OWN),
    ("algorithm.advantage_mode", "[grpo]", OWN),
    ("algorithm.planning.detector", "[a]", OWN),
    ("algorithm.algorithm_mode", "true", "expected null, or a dotted path"),
    ("algorithm.advantage_params", "abc", "a mapping of names to values"),
    ("algorithm.info_gain_template", "[a]", "expected auto, or a text with {answer}"),
    ("trainer.logger", "[consol]", "console"),
    ("trainer.logger", "3", "console"),
    (f"{LOSS}._target_", "foo", "TurnPolicyLossConfig"),
    *((key, "9" * 400, "a whole number of at most 63 bits") for key in (
        "seed", "algorithm.gamma", "data.max_response_length", f"{ACTOR}.checkpoint.save_contents")),
    *((key, LONG, "at most 255 bytes") for key in (
        "run_dir", "trainer.default_local_dir", "lab.dir", "lab.index")),
    ("run_dir", "'~nobody_at_all/x'", "the home of no user"),
    ("run_dir", f"'a/{'é' * 130}/b'", "at most 255 bytes"),
    ("run_dir", "/".join(["x" * 200] * 20), "at most 3840 bytes"),
    *((key, value, "there is no such file") for key in CODE for value in (LONG, "[a]")),
    *((key, value, "there is no such file") for key in TOOL_FILES for value in ("[a]", "3")),
    *((key, "'~nobody_at_all/x.py'", "~nobody_at_all is the home of no user; expected a path")
      for key in (*CODE, *TOOL_FILES, LISTED, "actor_rollout_ref.model.path", "data.train_files")),
    (f"{LOSS}.loss_mode", "'~nobody_at_all/x.py'", "turn_ppo"),
]
# fmt: on


@pytest.mark.parametrize("key, value, accepted", REFUSED, ids=lambda text: text[:40])
def test_a_value_that_cannot_be_meant_is_refused_by_name(key, value, accepted):
    config = load_config("lab", [f"{key}={value}"])
    with pytest.raises(ConfigError) as caught:
        validate(config)
    given = OmegaConf.select(config, key)
    assert (caught.value.key, caught.value.value) == (key, given)
    text = caught.value.accepted
    assert accepted in (text if isinstance(text, str) else ", ".join(text))
    assert str(caught.value).startswith(f"{key}=") and len(str(caught.value).splitlines()) == 1


def test_a_number_too_long_to_be_written_is_refused_all_the_same():
    config = load_config("lab")
    config.seed = 1 << 50_000  # in a recipe: 0x1000...
    with pytest.raises(ConfigError) as caught:
        validate(config)
    assert (caught.value.key, caught.value.value) == ("seed", 1 << 50_000)
    assert caught.value.accepted == "expected a whole number of at most 63 bits"
    assert str(caught.value).startswith("seed=a number of 50001 bits: ")


def test_a_loss_without_a_class_is_refused():
    error = refused(f"~{LOSS}._target_")
    assert (error.key, error.value) == (f"{LOSS}._target_", None) and TARGET in error.accepted


@pytest.mark.parametrize(
    "key, value, said",
    [
        ("data", None, "data=null: expected a section with keys"),
        (f"{MODEL}.override_config", None, "override_config=null: expected a section with keys"),
        ("actor_rollout_ref.rollout.multi_turn", None, "multi_turn=null: expected a section with keys"),
        ("trainer", None, "trainer.device=None: accepted are cpu, cuda"),
        (ACTOR, "${nothing}", f"{ACTOR} has no value: Interpolation key 'nothing' not found"),
        ("data", "${nothing}", "data has no value: Interpolation key 'nothing' not found"),
        ("reward", "???", "reward.num_workers=None: expected a whole number"),
        ("reward", "${trainer}", "reward.num_workers=None: expected a whole number"),
        (
            "algorithm.algorithm_mode",
            "${nothing}",
            "algorithm.algorithm_mode has no value: Interpolation key",
        ),
        ("run_dir", "a\0b", "without null bytes"),
        ("data.\n", 1, r"unknown key data.\n: accepted below data are"),
        ("trainer.device", "\x1b[31m\ud800", r"trainer.device='\x1b[31m\ud800': accepted are cpu, cuda"),
    ],
)
def test_what_a_file_can_hold_and_no_section_or_value_is_is_one_plain_line(key, value, said):
    config = load_config("lab")
    OmegaConf.update(config, key, value, merge=False, force_add=True)
    with pytest.raises(ConfigError) as caught:
        validate(config)
    assert said in str(caught.value) and str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["total_training_steps", "resume_mode"])
def test_a_key_of_verl_s_that_was_taken_out_is_named(name):
    assert refused(f"~trainer.{name}").key == f"trainer.{name}"


@pytest.mark.parametrize("value", ["[", "a=b", "'a", "\x1b"])
def test_an_override_that_hydra_cannot_read_is_named(value):
    error = refused(f"trainer.device={value}")
    assert (error.key, error.value) == ("trainer.device", value)
    assert "Hydra cannot read that override" in error.accepted and str(error).isprintable()


def test_a_preset_that_is_none_is_named():
    error = refused("credit_preset=grpp")
    assert (error.key, error.value) == ("credit_preset", "grpp") and {"grpo", "trace", "cigpo"} < set(
        error.accepted
    )


@pytest.mark.slow
def test_what_verl_knows_is_accepted():
    check("trainer.logger=[console,file]", "algorithm.kl_penalty=k3+")
    check("trainer.device=cuda", "actor_rollout_ref.rollout.name=vllm")


def test_the_names_are_verl_s():
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, kl_penalty
    from verl.utils.tracking import Tracking

    from verl_credit.host.actor.policy_loss import TurnPolicyLossConfig
    from verl_credit.names import LOSS_MODE

    assert set(LOGGERS) == set(Tracking.supported_backend)
    assert set(VERLS_LOSSES) == set(POLICY_LOSS_REGISTRY) - {LOSS_MODE}
    assert f"{TurnPolicyLossConfig.__module__}.{TurnPolicyLossConfig.__name__}" == TARGET
    for name in KL_PENALTIES:
        assert kl_penalty(torch.zeros(1), torch.zeros(1), name) == 0


@pytest.mark.parametrize("value", ["abc", "3"])
def test_a_value_in_place_of_the_models_section_is_refused_although_its_model_is_read_first(value):
    error = refused(f"++{MODEL}.override_config={value}")
    assert error.key == f"{MODEL}.override_config" and error.accepted == "expected a section with keys"
