"""An estimator of verl's beside keys of turn credit is refused, `credit=verl` is it aloud; files and loops are there."""

import pytest

from kit.recipes import check, refused
from verl_credit.cli import main
from verl_credit.config.settings import CreditSettings
from verl_credit.recipe.rules.estimator import ELSEWHERE, VERLS

KEY, MODE = "algorithm.adv_estimator", "algorithm.info_gain_norm_mode"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
LOOP, TOOLS = f"{ROLLOUT}.agent.default_agent_loop", f"{ROLLOUT}.multi_turn.tool_config_path"
REWARD = "reward.custom_reward_function.path"


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["grpo", "gae", "rloo"])
def test_verls_own_estimator_is_chosen_aloud(estimator, capsys):
    config = check("credit=verl", f"{KEY}={estimator}")
    settings = CreditSettings.from_config(config)
    assert not settings.turn_estimator and not settings.scores_gain and not settings.dynamic_clip
    assert main(["explain", "credit=verl", f"{KEY}={estimator}"]) == 0
    said = capsys.readouterr().out
    assert f"verl's {estimator}" in said and "off: turn credit" in said and "unused keys" not in said


def test_the_estimators_are_those_of_verl():
    from verl.trainer.ppo.core_algos import AdvantageEstimator

    assert set(VERLS) == {one.value for one in AdvantageEstimator} and not set(VERLS) & set(ELSEWHERE)


@pytest.mark.slow
@pytest.mark.parametrize("name, place", ELSEWHERE.items())
def test_an_estimator_of_another_project_is_refused_with_its_place_here(name, place):
    error = refused(f"{KEY}={name}")
    assert error.key == KEY and place in error.accepted
    for choice in place.split(" or "):
        kind = [] if "transform" not in choice else ["algorithm.uncertainty_kind=shannon_entropy"]
        check(choice, *([*kind, f"{MODE}=none"] if kind else []))


@pytest.mark.slow
@pytest.mark.parametrize(
    "override",
    [
        "trainer.use_v1=false", f"{REWARD}=/nowhere/score.py", f"{REWARD}=pkg://no_such_package.score",
        f"{TOOLS}=/nowhere/tools.yaml", f"{LOOP}=another_agent", f"{LOOP}=tool_agent", f"{KEY}=grppo",
    ],
)  # fmt: skip
def test_explain_plan_and_doctor_refuse_alike(override, capsys):
    error = refused(override)
    assert error.key == override.partition("=")[0]
    for command in ("explain", "plan"):
        assert main([command, "--config-name", "lab", override]) == 4
        assert str(error) in capsys.readouterr().out, command


@pytest.mark.slow
def test_files_that_are_there_are_accepted(tmp_path):
    (tmp_path / "score.py").write_text("def compute_score(**given): return 0.0\n")
    check(f"{REWARD}={tmp_path}/score.py")
    check(f"{REWARD}=file://{tmp_path}/score.py")
    (tmp_path / "tools.yaml").write_text("tools: []\n")
    check(f"{TOOLS}={tmp_path}/tools.yaml")


def test_a_loop_that_a_module_of_the_users_may_register_is_left_to_verl():
    check(f"{LOOP}=another_agent", "actor_rollout_ref.model.external_lib=mine")


def half(tables, *, share: float = 0.5):
    """A lawful mode of a user's: the outcome's advantage, times a share for tool turns."""
    outcome_B = tables.outcome_advantage("grpo")
    return share * outcome_B[:, None].expand_as(tables.reward_B_K), outcome_B, tables.ones()


@pytest.mark.slow
def test_a_users_turn_mode_is_described_with_its_parameters(capsys):
    dynamic = f"{ACTOR}.policy_loss.dynamic_clip=auto"
    assert main(["explain", f"{MODE}={__name__}.half", "+algorithm.turn_params.share=0.25", dynamic]) == 0
    said = capsys.readouterr().out
    stage = said.split(f"turn: {__name__}.half\n")[1].split("\n2. ")[0]
    assert "yours" in stage and "share=0.25" in stage and "rewards of a prompt" not in stage
