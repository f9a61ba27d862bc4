"""verl's rollout correction: what is set and read by nothing is said, what verl would refuse later is refused now."""

import pytest

from kit.recipes import load_config
from verl_credit.errors import ConfigError
from verl_credit.host.process.correction import check_correction
from verl_credit.recipe.rules.correction import correction_without_effect
from verl_credit.recipe.unread import idle_lines

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


def test_that_bypass_mode_applies_nothing_is_still_true_of_verl():
    """Where verl's v1 trainer learns to, the line above must go."""
    import inspect

    from verl.trainer.ppo.v1 import trainer_base

    source = inspect.getsource(trainer_base)
    assert "and not bypass_recomputing_logprobs" in source and "apply_bypass_mode" not in source
