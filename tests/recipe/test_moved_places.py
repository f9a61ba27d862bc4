"""A recipe, or a file of the user's that it names, which says a module's old place: refused with the new one."""

import pytest

from kit.recipes import check
from verl_credit.cli import main
from verl_credit.errors import ConfigError
from verl_credit.names import MOVED
from verl_credit.recipe.agent_loops import LISTED, TOOLS

REWARD = "reward.custom_reward_function.path"
LOSS = "actor_rollout_ref.actor.policy_loss._target_"
MODULES = "actor_rollout_ref.model.external_lib"


def refused(*overrides):
    with pytest.raises(ConfigError) as error:
        check(*overrides)
    return error.value.key, error.value.value, error.value.accepted


@pytest.mark.parametrize(
    "key, old, now",
    [
        (REWARD, "pkg://verl_credit.reward.qa", "pkg://verl_credit.turns.reward.qa"),
        (
            LOSS,
            "verl_credit.host.loss.TurnPolicyLossConfig",
            "verl_credit.host.actor.loss.TurnPolicyLossConfig",
        ),
        (MODULES, "verl_credit.probe", "verl_credit.study.probe"),
        ("algorithm.turn_signal", "verl_credit.search.tool:signal", "verl_credit.turns.search.tool:signal"),
    ],
)
def test_a_value_that_names_an_old_place_is_refused_with_the_new_one(key, old, now):
    assert refused(f"{key}='{old}'") == (key, old, [now])


@pytest.mark.slow
def test_every_old_place_is_refused_wherever_it_stands():
    for old, now in MOVED.items():
        assert refused(f"{MODULES}=[json,{old}.part]") == (f"{MODULES}.1", f"{old}.part", [f"{now}.part"])


def test_what_merely_contains_such_a_name_is_not_a_place():
    check("trainer.experiment_name='about verl_credit.lab'", "run_dir=runs/verl_credit.lab/one")


@pytest.mark.slow
def test_a_users_recipe_with_the_old_reward_function_says_the_new_one(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text(
        "defaults: [lab, _self_]\nreward: {custom_reward_function: {path: 'pkg://verl_credit.reward.qa'}}\n"
    )
    assert main(["explain", "--config-name", "mine", "--config-dir", str(tmp_path), "run_dir=x"]) == 4
    printed = capsys.readouterr().out
    assert (
        f"{REWARD}=pkg://verl_credit.reward.qa" in printed and "pkg://verl_credit.turns.reward.qa" in printed
    )


OLD_IMPORT, NEW_IMPORT = (
    f"from verl_credit.{room}protocol import SCHEMA" for room in ("search.", "turns.search.")
)


def test_an_agent_loops_class_or_module_that_names_an_old_place_is_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "loops.yaml"
    file.write_text("- {name: mine, _target_: verl_credit.search.agent.Loop}\n")
    assert refused(f"{LISTED}={file}") == (LISTED, str(file), ["verl_credit.turns.search.agent.Loop"])
    file.write_text("- {name: mine, _target_: loops_of_mine.Loop}\n")
    module = tmp_path / "loops_of_mine.py"
    module.write_text(f"# verl_credit.search moved\n{OLD_IMPORT}\nraise SystemExit\n")
    assert refused(f"{LISTED}={file}") == (LISTED, str(file), [NEW_IMPORT])
    module.write_text(f"{NEW_IMPORT}\n")
    check(f"{LISTED}={file}")


def test_a_tools_class_module_or_file_that_names_an_old_place_is_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "tools.yaml"
    file.write_text("tools: [{class_name: verl_credit.lab.tools.Tool}]\n")
    assert refused(f"{TOOLS}={file}") == (TOOLS, str(file), ["verl_credit.worlds.lab.tools.Tool"])
    (tmp_path / "tools_of_mine.py").write_text(f"def tool():\n    {OLD_IMPORT}\n")
    file.write_text("tools: [{class_name: tools_of_mine.Tool}]\n")
    assert refused(f"{TOOLS}={file}") == (TOOLS, str(file), [NEW_IMPORT])
    functions = "actor_rollout_ref.rollout.multi_turn.function_tool_path"
    path = str(tmp_path / "tools_of_mine.py")
    assert refused(f"{functions}={path}") == (functions, path, [NEW_IMPORT])
    assert refused(f"{REWARD}={path}") == (REWARD, path, [NEW_IMPORT])
