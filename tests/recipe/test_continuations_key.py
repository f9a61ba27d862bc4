"""`algorithm.turn_values=monte_carlo` before a start: what is refused by key, what is said, and what it costs."""

import json

import pytest

from kit.recipes import check
from verl_credit.cli import main
from verl_credit.cli.recipe.stages import explanation
from verl_credit.config.settings import CreditSettings
from verl_credit.errors import ConfigError
from verl_credit.recipe.unread import unused

KEY, C = "algorithm.turn_values", "algorithm.turn_continuations"
CHOSEN = "algorithm.info_gain_norm_mode=turn_gae", f"{KEY}=monte_carlo"
ROLLOUT = "actor_rollout_ref.rollout"


def refused(*overrides) -> ConfigError:
    with pytest.raises(ConfigError) as found:
        check(*CHOSEN, *overrides)
    return found.value


@pytest.mark.parametrize("otherwise", ["leave_one_out", "group", "features", "column:belief"])
def test_the_values_of_the_other_states(otherwise):
    settings = CreditSettings.from_config(check(*CHOSEN, f"{C}.otherwise={otherwise}"))
    assert settings.algorithm.observed_values == otherwise


def test_no_other_name_and_not_itself():
    error = refused(f"{C}.otherwise=monte_carlo")
    assert (error.key, error.value) == (f"{C}.otherwise", "monte_carlo")
    assert error.accepted[:3] == ["leave_one_out", "group", "features"]
    with pytest.raises(ConfigError) as found:
        check(CHOSEN[0], f"{KEY}=leave_one_out")
    assert found.value.key == KEY


@pytest.mark.parametrize(
    ("overrides", "key", "why"),
    [
        (["trainer.v1.trainer_mode=credit_colocate_async"], "trainer.v1.trainer_mode", "still their policy"),
        ([f"{ROLLOUT}.full_determinism=true"], f"{ROLLOUT}.full_determinism", "the same text"),
        (["algorithm.use_kl_in_reward=true"], "algorithm.use_kl_in_reward", "not in these"),
        ([f"{ROLLOUT}.temperature=0.7"], f"{ROLLOUT}.temperature", "at temperature 1"),
        ([f"{ROLLOUT}.top_k=50"], f"{ROLLOUT}.top_k", "set it to -1"),
        (["algorithm.gamma=0.9"], "algorithm.gamma", "set it to 1"),
        (["algorithm.turn_signal=info_gain"], "algorithm.turn_signal", "set it to none"),
        (["algorithm.turn_signals={info_gain: 1.0}"], "algorithm.turn_signals", "set it to null"),
        ([f"{ROLLOUT}.calculate_log_probs=false", f"{C}.choose=uncertainty"], f"{ROLLOUT}.calculate_log_probs", "true"),
        ([f"{C}.states=0"], f"{C}.states", "at least 1"),
        ([f"{C}.choose=entropy"], f"{C}.choose", "uncertainty"),
    ],
)  # fmt: skip
def test_what_cannot_be_tried_again_is_refused_by_key(overrides, key, why):
    error = refused(*overrides)
    text = str(error)
    assert key in text and why in text, text


def test_tools_that_may_not_be_called_twice_have_to_be_declared(tmp_path):
    (tmp_path / "tools.py").write_text("")
    tools = f"{ROLLOUT}.multi_turn.function_tool_path={tmp_path / 'tools.py'}"
    error = refused(tools)
    assert (
        error.key == f"{C}.repeatable_tools" and error.value is False and "calls are made again" in str(error)
    )
    assert check(*CHOSEN, tools, f"{C}.repeatable_tools=true")


def test_keys_that_nothing_reads_are_named():
    config = check("algorithm.info_gain_norm_mode=turn_gae", f"{KEY}=group", f"{C}.states=3")
    assert f"{C}.states=3" in unused(config, CreditSettings.from_config(config))
    config = check(*CHOSEN, f"{KEY}_replay=2")
    assert f"{KEY}_replay=2" in unused(config, CreditSettings.from_config(config))


def test_explain_and_plan_name_the_price(capsys):
    given = [*CHOSEN, f"{C}.states=10", f"{C}.count=3", f"{C}.every=2"]
    text = explanation("lab", check(*given))
    assert "values: monte_carlo" in text and "up to 30 rollouts from the middle in every 2. step" in text
    assert main(["plan", "--config-name", "lab", "--json", *given]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["step"]["tokens"]["continued"] == 15 / 2 * plan["assumptions"]["mean_generated_tokens"]
    assert plan["step"]["seconds"]["continuations"] > 0
