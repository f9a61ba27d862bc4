"""`algorithm.info_gain_norm_mode=auto`: the credit of a run that names none, and the sentence that says why."""

import pytest

from kit.idle import idle_lines, unused
from kit.recipes import check, load_config
from verl_credit.config.keys import AUTO, Algorithm
from verl_credit.config.settings import CreditSettings
from verl_credit.recipe.default_credit import MODE, PARAMS, VALUES

ROLLOUT = "actor_rollout_ref.rollout"
TURNS = f"{ROLLOUT}.agent.default_agent_loop=turn_agent"
OWN_REWARD = "reward.custom_reward_function.path=my_reward.py"
NO_TOOL = ("search.max_searches=0",)


def auto(*given):
    return load_config("lab", [f"{MODE}=auto", *given])


def chosen(*given):
    algorithm = auto(*given).algorithm
    return algorithm.info_gain_norm_mode, algorithm.turn_values, algorithm.lam


@pytest.mark.parametrize(
    "given, credit, why",
    [
        ((), ("turn_gae", "features", 0.8), "gold answers"),
        ((TURNS,), ("turn_gae", "state", 0.9), "equal states"),
        ((OWN_REWARD,), ("turn_gae", "state", 0.9), "equal states"),
        ((OWN_REWARD, f"{ROLLOUT}.n=1"), ("turn_gae", "group", 0.9), "its turn"),
        ((f"{ROLLOUT}.n=1",), ("turn_gae", "features", 0.8), "gold answers"),
        ((f"{VALUES}=column:belief",), ("turn_gae", "column:belief", 0.8), VALUES),
        (NO_TOOL, ("none", None, 1.0), "one turn"),
        (("algorithm.advantage_mode=maxrl",), ("none", None, 1.0), "outcome operator"),
        (("algorithm.transform_mode=grpo_s",), ("none", None, 1.0), "outcome operator"),
        (("algorithm.algorithm_mode=my_module.mine",), ("none", None, 1.0), "algorithm.algorithm_mode"),
        (("algorithm.adv_estimator=grpo",), ("none", None, 1.0), "verl's estimator"),
        (("algorithm.turn_signal=tool_reward",), ("turn-group-v1d", None, 1.0), "turn signal"),
        (("algorithm.turn_signals={info_gain: 1}",), ("turn-group-v1d", None, 1.0), "turn signal"),
    ],
)
def test_what_a_run_that_names_no_credit_has_and_why(given, credit, why):
    assert chosen(*given) == credit
    said = [line for line in idle_lines(auto(*given)) if line.startswith("credit: ")]
    assert len(said) == 1 and f"info_gain_norm_mode={credit[0]}" in said[0] and why in said[0]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["lab", "search_cpu", "verl"])
def test_the_credit_of_a_recipe_without_a_mode_is_accepted_and_read(recipe):
    given = (
        ()
        if recipe == "lab"
        else ("data.train_files=x", "data.val_files=x", "actor_rollout_ref.model.path=x")
    )
    given += ("search.url=http://x",) if recipe == "search_cpu" else ()
    config = check(f"{MODE}=auto", *given, *((f"{ROLLOUT}.n=8",) if recipe == "verl" else ()), recipe=recipe)
    assert unused(config) == [] and config.credit_reason
    assert config.algorithm.info_gain_norm_mode == ("none" if recipe == "verl" else "turn_gae")


def test_it_is_the_default_of_the_key():
    assert Algorithm.model_fields["info_gain_norm_mode"].default == AUTO


def test_the_floor_is_for_outcomes_of_a_known_unit():
    assert "rms_floor" not in auto().algorithm.turn_params
    assert auto(OWN_REWARD).algorithm.turn_params.rms_floor == 0


def test_what_the_run_names_stays():
    config = auto("algorithm.lam=1", "+algorithm.turn_params.negative=1")
    assert (config.algorithm.lam, dict(config.algorithm.turn_params)) == (1, {"negative": 1})
    assert "lam" not in config.credit_reason and PARAMS.rpartition(".")[2] not in config.credit_reason


@pytest.mark.slow
@pytest.mark.parametrize("given", ["credit=released", "credit=paper", "credit=grpo", f"{MODE}=turn_gae"])
def test_a_mode_that_is_named_is_the_runs(given):
    config = load_config("lab", [given])
    assert (
        config.credit_reason is None and config.algorithm.lam == 1.0 and config.algorithm.turn_values is None
    )


@pytest.mark.slow
def test_the_preset_of_values_differs_from_the_default_by_its_rollouts_and_the_weight_below_0():
    default, preset = map(CreditSettings.from_config, (auto(), load_config("lab", ["credit=values"])))
    assert default.turn_options | {"negative": 0.25} == preset.turn_options
    assert default.algorithm.turn_values == preset.algorithm.turn_values
