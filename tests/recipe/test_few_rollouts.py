"""Few rollouts of a question: which credit can do with one, how large a step is, and what is said beside values."""

import pytest

from kit.idle import idle_lines
from kit.recipes import check, load_config, refused
from verl_credit.config.keys import reads
from verl_credit.config.settings import CreditSettings
from verl_credit.credit.turn.modes import MODES
from verl_credit.recipe.step_size import EACH, StepSize, step_line

MODE, VALUES, OUTCOME = "algorithm.info_gain_norm_mode", "algorithm.turn_values", "algorithm.advantage_mode"
BATCH, MINI = "data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"
GAE, FEATURES, ONE = f"{MODE}=turn_gae", f"{VALUES}=features", f"{EACH}=1"
NONE, HERE = f"{MODE}=none", __name__


def reinforce(rewards):
    return list(rewards)


reinforce.reads = ("rewards",)


def relative(rewards):
    return [reward - sum(rewards) / len(rewards) for reward in rewards]


@pytest.mark.parametrize("name", [name for name in MODES if name not in ("turn_gae", "progress")])
def test_a_mode_that_compares_rollouts_is_refused_with_one(name):
    error = refused(f"{MODE}={name}", ONE)
    assert (error.key, error.value) == (EACH, 1) and "at least 2" in error.accepted and MODE in error.beside


@pytest.mark.parametrize("operator", ["grpo", "rloo", "maxrl", f"{HERE}.relative"])
def test_so_is_an_outcome_operator_that_compares_them(operator):
    error = refused(NONE, f"{OUTCOME}={operator}", ONE)
    assert (error.key, error.value) == (EACH, 1) and OUTCOME in error.beside


@pytest.mark.parametrize(
    "given", [(GAE, FEATURES), (GAE, f"{VALUES}=group"), (NONE, f"{OUTCOME}={HERE}.reinforce")]
)
def test_what_compares_no_rollouts_takes_one(given):
    settings = CreditSettings.from_config(check(*given, ONE))
    assert not reads.grouped(settings)


@pytest.mark.slow
def test_values_of_equal_states_need_two():
    error = refused(GAE, f"{VALUES}=state", ONE)
    assert (error.key, error.value, error.beside) == (EACH, 1, (VALUES,)) and "at least 2" in error.accepted
    check(GAE, f"{VALUES}=state", f"{EACH}=2")


@pytest.mark.slow
def test_tied_groups_are_left_out_where_a_credit_compares_them():
    assert refused(GAE, FEATURES, "algorithm.tied_groups=skip").key == "algorithm.tied_groups"
    check(NONE, "algorithm.tied_groups=skip")


def test_the_preset_asks_more_questions_in_as_many_rollouts_and_updates():
    recipe, values = load_config("lab"), check("credit=values")
    assert StepSize.of(recipe) == (16, 8, 4) and StepSize.of(values) == (64, 2, 4)
    assert step_line(values, recipe, "lab").endswith("without overrides: " + str(StepSize.of(recipe)))
    assert step_line(recipe, recipe, "lab").endswith("as in the recipe")


@pytest.mark.parametrize("given, size", [((f"{EACH}=8",), (16, 8, 4)), ((f"{BATCH}=32",), (32, 2, 8))])
def test_overrides_of_the_size_win_over_the_preset(given, size):
    assert StepSize.of(check("credit=values", *given)) == size


@pytest.mark.parametrize(
    "given, warned", [((GAE, FEATURES), True), ((f"{MODE}=turn-group-v1d",), True), ((NONE,), False)]
)
def test_a_filter_that_throws_away_turns_with_credit_is_noted(given, warned):
    lines = idle_lines(load_config("lab", [*given, "algorithm.filter_groups.enable=true"]))
    assert any("algorithm.filter_groups.enable=true" in line for line in lines) is warned
    assert not any("filter_groups" in line for line in idle_lines(load_config("lab", given)))


@pytest.mark.slow
def test_a_small_lam_beside_values_of_the_group_in_a_loop_of_ones_own(tmp_path):
    (loops := tmp_path / "loops.yaml").write_text("- {name: mine, _target_: my_module.MyLoop}\n")
    own = f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loops}"
    error = refused(GAE, f"{VALUES}=group", "algorithm.lam=0.5", own)
    assert (error.key, error.value) == ("algorithm.lam", 0.5) and "at least 0.9" in error.accepted
    assert f"{VALUES}=state" in error.accepted
    for accepted in (("algorithm.lam=0.9", own), ("algorithm.lam=0.5",)):
        check(GAE, f"{VALUES}=group", *accepted)
    check(GAE, f"{VALUES}=state", "algorithm.lam=0.5", own)
