"""verl's rollout correction: what is set and read by nothing is said, what verl would refuse later is refused now."""

from itertools import cycle

import pytest
from verl.trainer.config.algorithm import RolloutCorrectionConfig

from kit.idle import idle_lines
from kit.recipes import check, load_config, refused
from verl_credit.errors import ConfigError
from verl_credit.host.process.verl_checks import check_correction, check_trace
from verl_credit.names import TRAINING_MODES
from verl_credit.recipe.rules.trainer_mode import (
    CORRECTION_DEFAULTS,
    compares_with_the_writer,
    correction_without_effect,
)

KEY = "algorithm.rollout_correction"
BYPASS = (f"{KEY}.bypass_mode=true", "algorithm.info_gain_scorer=rows")
REJECTS = (f"{KEY}.rollout_rs=token_k2", f"{KEY}.rollout_rs_threshold=0.1")
WITHOUT = "actor_rollout_ref.rollout.calculate_log_probs=false"


# fmt: off
WITHOUT_EFFECT = [
    ((*BYPASS, f"{KEY}.rollout_is=token"), (f"{KEY}.rollout_is=token", "bypass_mode=true", "weighs no token")),
    ((*BYPASS, *REJECTS), (f"{KEY}.rollout_rs=token_k2", "rejects none")),
    ((WITHOUT, *REJECTS), ("without the rollout engine's log-probs", "calculate_log_probs=true")),
    ((f"{KEY}.rollout_is_threshold=4",), (f"{KEY}.rollout_is_threshold=4: what would read it is off",)),
    ((f"{KEY}.loss_type=reinforce", *REJECTS), (f"{KEY}.loss_type=reinforce: what would read",)),
]
# fmt: on


@pytest.mark.parametrize("overrides, words", WITHOUT_EFFECT)
def test_a_correction_that_is_set_and_acts_on_nothing_is_said(overrides, words):
    config = load_config("lab", overrides)
    (line,) = correction_without_effect(config)
    assert all(word in line for word in words)
    assert any(line in shown for shown in idle_lines(config))


@pytest.mark.parametrize(
    "overrides", [(), BYPASS, REJECTS, (f"{KEY}.rollout_is=sequence", f"{KEY}.rollout_is_threshold=4")]
)
def test_nothing_is_said_of_what_acts_or_is_off(overrides):
    config = load_config("lab", overrides)
    assert correction_without_effect(config) == []
    check_correction(config)


@pytest.mark.parametrize(
    "overrides, words",
    [
        ((REJECTS[0],), "rollout_rs_threshold must be explicitly provided"),
        ((f"{KEY}.rollout_rs=token_k9", REJECTS[1]), "Invalid rollout_rs option: token_k9"),
        ((f"{KEY}.rollout_is=word",), "Invalid rollout_is: word"),
        ((*BYPASS, WITHOUT), "bypass_mode=true trains on the rollout engine's log-probs"),
    ],
)
def test_what_verl_would_refuse_at_its_first_step_is_refused_before_the_start(overrides, words):
    with pytest.raises(ConfigError, match=words):
        check_correction(load_config("lab", list(overrides)))


PRESETS = [name for name, value in vars(RolloutCorrectionConfig).items() if isinstance(value, classmethod)]


@pytest.mark.slow
def test_every_preset_of_verl_is_accepted_and_what_it_leaves_undone_is_said():
    assert {"decoupled_token_icepop", "bypass_pg_token_icepop", "decoupled_geo_rs"} < set(PRESETS)
    for name, mode in zip(PRESETS, cycle(TRAINING_MODES), strict=False):
        preset = getattr(RolloutCorrectionConfig, name)()
        keys = {key: getattr(preset, key) for key in (*CORRECTION_DEFAULTS, "bypass_mode")}
        given = [f"{KEY}.{key}={'null' if value is None else value}" for key, value in keys.items()]
        scorer = ["algorithm.info_gain_scorer=rows"] if preset.bypass_mode else []
        config = check(f"trainer.v1.trainer_mode={mode}", *given, *scorer)
        check_correction(config)
        corrected = bool(preset.rollout_is or preset.rollout_rs)
        idle = preset.bypass_mode and (corrected or preset.loss_type != "ppo_clip")
        assert bool(correction_without_effect(config)) == idle, name
        asynchronous = mode != "credit" and not corrected
        assert compares_with_the_writer(config) == (preset.bypass_mode or asynchronous)


@pytest.mark.slow
@pytest.mark.parametrize("mode", TRAINING_MODES)
def test_bypass_mode_needs_a_scorer_with_a_forward_of_its_own_in_every_trainer(mode):
    error = refused(BYPASS[0], f"trainer.v1.trainer_mode={mode}", "algorithm.info_gain_scorer=branch")
    assert (error.key, error.value) == (f"{KEY}.bypass_mode", True)
    assert "the old_log_probs forward, which is then not made" in error.accepted
    chosen = check(BYPASS[0], f"trainer.v1.trainer_mode={mode}")
    assert chosen.algorithm.info_gain_scorer == "rows"


# fmt: off
LOST = [  # what was given, what was read, what happens to a token of unchanged probability
    ("rollout_is=token", "0.5_5", 0.55, "would weigh 0.55, and not 1"),
    ("rollout_is=sequence", "0.9", 0.9, "would weigh 0.9, and not 1"),
    ("rollout_is=token", "'0.5'", "0.5", "would weigh 0.5, and not 1"),
    ("rollout_is=token", "0.5_0.9", "0.5_0.9", "would weigh 0, and not 1"),
    ("rollout_is=token", "2.0_5.0", "2.0_5.0", "would weigh 0, and not 1"),
    ("rollout_rs=token_k1", "0.5_0.9", "0.5_0.9", "would be rejected"),
    ("rollout_rs=seq_mean_k1", "2.0_5.0", "2.0_5.0", "would be rejected"),
    ("rollout_rs=token_k1", "0", 0, "would be rejected"),
]
# fmt: on


@pytest.mark.parametrize("kind, given, value, words", LOST)
def test_bounds_that_lose_tokens_of_unchanged_probability_are_refused(kind, given, value, words):
    key = f"{KEY}.{kind.partition('=')[0]}_threshold"
    with pytest.raises(ConfigError) as caught:
        check_correction(load_config("lab", [f"{KEY}.{kind}", f"{key}={given}"]))
    assert (caught.value.key, caught.value.value) == (key, value)
    assert words in caught.value.accepted


@pytest.mark.slow
def test_bounds_around_1_are_accepted_and_any_where_weights_are_normalised():
    key, normalise = f"{KEY}.rollout_is_threshold", f"{KEY}.rollout_is_batch_normalize=true"
    for bounds, *more in (["0.5_5.0"], ["1"], ["2.0"], ["1.0_1.0"], ["0.9", normalise]):
        check_correction(load_config("lab", [f"{KEY}.rollout_is=token", f"{key}={bounds}", *more]))
    rejects = [f"{KEY}.rollout_rs=token_k1", f"{KEY}.rollout_rs_threshold=0.9_1.1"]
    check_correction(load_config("lab", rejects))
    with pytest.raises(ConfigError, match="would weigh 0, and not 1"):  # verl normalises no sum of 0
        check_correction(load_config("lab", [f"{KEY}.rollout_is=token", f"{key}=2.0_5.0", normalise]))


@pytest.mark.slow
def test_verls_loss_for_bypass_mode_is_not_given_log_probs_of_the_trainer():
    loss, mode = "actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode", "trainer.v1.trainer_mode"
    for more in ((), (f"{mode}=credit_colocate_async", f"{KEY}.rollout_is=token")):
        error = refused(loss, *more)
        assert (error.key, error.value) == tuple(
            loss.split("=")
        ) and f"set {KEY}.bypass_mode=true" in error.accepted
    check(loss, f"{mode}=credit_colocate_async")  # the writer's, as the engine has them
    check(loss, *BYPASS)


def test_a_trace_whose_package_is_not_installed_is_refused_before_ray():
    key = "actor_rollout_ref.rollout.trace.backend"
    check_trace(load_config("lab"))
    config = load_config("lab")
    config.actor_rollout_ref.rollout.trace.backend = "no_such_tracer"
    with pytest.raises(ConfigError, match=f"{key}=no_such_tracer.* pip install no_such_tracer"):
        check_trace(config)
