"""`verl-credit adopt`: what it prints, the file that it writes, and what it refuses."""

import shlex

import pytest
import yaml

from kit.recipes import composed_once
from verl_credit.cli import main
from verl_credit.recipe import compose
from verl_credit.recipe.adopt import launch_files as sources
from verl_credit.recipe.adopt.adoption import value_of

LAUNCH = "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4"
MICRO = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2"
TOOLS = "actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml"


@pytest.fixture(autouse=True)
def once(monkeypatch, tmp_path_factory):
    monkeypatch.setattr(compose, "compose_recipe", composed_once)
    folder = tmp_path_factory.mktemp("own")
    for name in ("mine.py", "tools.yaml", "t.yaml"):
        (folder / name).touch()
    monkeypatch.chdir(folder)


def run(capsys, *arguments):
    code = main(["adopt", *arguments])
    return code, capsys.readouterr().out


def test_overrides_are_translated_and_the_new_command_is_accepted(capsys):
    older = [
        "algorithm.adv_estimator=grpo",
        "custom_reward_function.path=mine.py",
        "trainer.use_v1=false",
        TOOLS,
    ]
    code, printed = run(capsys, "--", *older, "actor_rollout_ref.rollout.n=4", "+my.key=1", MICRO)
    assert code == 0
    for line in (
        "algorithm.adv_estimator=grpo -> algorithm.advantage_mode=grpo",
        "custom_reward_function.path=mine.py -> reward.custom_reward_function.path=mine.py",
        "trainer.use_v1=false   (verl_credit trains with verl's v1 trainer",
        "my.key=1   (neither verl 0.9.1 nor verl_credit reads it)",
    ):
        assert line in printed
    (command,) = (line for line in printed.splitlines() if line.startswith("verl-credit explain "))
    assert main(shlex.split(command)[1:]) == 0
    assert "turn: turn_gae" in capsys.readouterr().out


def test_a_script_becomes_a_recipe_in_a_file_that_explain_reads(capsys, tmp_path):
    (tmp_path / "run.sh").write_text(
        f"{LAUNCH} {MICRO} trainer.logger=['console'] data.train_files=\"['a b.parquet']\"\n"
    )
    file = tmp_path / "mine" / "adopted.yaml"
    given = ("--from", str(tmp_path / "run.sh"), "--write", str(file))
    code, printed = run(capsys, *given, "--", "hardware=h100x1", TOOLS)
    assert code == 0 and "explain accepts it" in printed
    recipe = yaml.safe_load(file.read_text())
    assert recipe["defaults"] == ["verl", {"override hardware": "h100x1"}, "_self_"]
    assert recipe["data"]["train_files"] == ["a b.parquet"] and recipe["trainer"]["logger"] == ["console"]
    named = ["--config-dir", str(file.parent), "--config-name", "adopted"]
    assert shlex.join(["verl-credit", "explain", *named]) in printed
    assert main(["explain", *named]) == 0
    assert main(["adopt", "--write", str(file), "--", MICRO]) == 4
    assert f"--write={file}: the file is there" in capsys.readouterr().out.splitlines()[-1]


def test_a_yaml_of_ones_own_stands_below_the_overrides(capsys, tmp_path):
    own = tmp_path / "mine.yaml"
    own.write_text(
        "hydra: {searchpath: [x]}\ndefaults: [ppo_trainer, _self_, {other: choice}]\n"
        "actor_rollout_ref:\n"
        "  rollout: {n: 4, name: sglang_async, multi_turn: {tool_config_path: t.yaml, max_turns: 3}}\n"
        "trainer: {project_name: 'it''s \"mine\", 1', experiment_name: '12'}\n"
        "custom_reward_function: {path: null}\nalgorithm: {adv_estimator: grpo}\n"
        "data: {max_response_length: 600, train_files: [a, b]}\n"
    )
    code, printed = run(capsys, "--config", str(own), "--", MICRO, "data.max_response_length=300")
    assert code == 3
    assert "other: choice of its defaults   (its keys are missing here)" in printed
    assert "max_assistant_turns=3" in printed and "'data.train_files=[a,b]'" in printed
    assert "requests are handed on, and no GPU has run it" in printed
    found = sources.read_launch(None, str(own), [])
    values = {key: value_of(key, text) for key, text in found.pairs}
    assert (values["trainer.project_name"], values["trainer.experiment_name"]) == ('it\'s "mine", 1', "12")
    again = tmp_path / "run.sh"
    again.write_text(f"python -m verl.trainer.main_ppo --config-path={tmp_path} --config-name mine {MICRO}\n")
    assert "'data.train_files=[a,b]'" in run(capsys, "--from", str(again))[1]


def test_what_is_not_possible_is_named_with_what_is(capsys):
    actor = "actor_rollout_ref.actor."
    megatron, ranks = f"{actor}strategy=megatron", f"{actor}ulysses_sequence_parallel_size=4"
    own = f"{actor}megatron.param_offload=True"
    given = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", megatron, own, ranks, MICRO]
    code, printed = run(capsys, "--", *given)
    assert code == 0
    assert "FSDP engine, which takes its place; Megatron is not possible" in printed
    assert f"{ranks}   (attention over several ranks is not built" in printed
    assert "attn_implementation=flash_attention_2" in printed


@pytest.mark.parametrize(
    "arguments, says",
    [
        ([], "nothing to adopt: give the overrides after --"),
        (["--from", "nowhere.sh"], "--from nowhere.sh: it cannot be read"),
        (["--from", "{tmp}/other.sh"], "it starts trl.scripts.grpo"),
        (["--config", "nowhere.yaml"], "nowhere.yaml cannot be read"),
        (["--config", "{tmp}/list.yaml"], "expected keys of verl.trainer.main_ppo"),
        (["--", MICRO, "train"], "'train': expected KEY=VALUE"),
        (["--", MICRO, "data.train_batch_size=many"], "explain refuses the result: "),
        (
            ["--", "actor_rollout_ref.rollout.n=1"],
            "explain refuses the result: actor_rollout_ref.rollout.n=1",
        ),
        (["--write", "{tmp}/x.txt", "--", "actor_rollout_ref.rollout.n=4"], "ends in .yaml"),
        (["--write", "{tmp}/x.yaml", "--", "actor_rollout_ref.rollout.n=1"], "explain refuses the result: "),
    ],
)
def test_a_launch_that_cannot_be_adopted_ends_with_4_and_one_line(arguments, says, capsys, tmp_path):
    (tmp_path / "other.sh").write_text("python -m trl.scripts.grpo --model x\n")
    (tmp_path / "list.yaml").write_text("[1, 2]\n")
    code, printed = run(capsys, *(text.format(tmp=tmp_path) for text in arguments))
    last = printed.splitlines()[-1]
    assert code == 4 and last.startswith("verl-credit adopt: ") and says in last
    assert not (tmp_path / "x.yaml").exists()


def test_the_text_that_a_gain_scores_is_noted_where_the_reward_is_not_ours(capsys):
    note = "algorithm.info_gain_template is not given: each turn is scored by the probability of <answer>GOLD</answer>"
    launch = ("--", TOOLS, "actor_rollout_ref.rollout.n=4", MICRO)
    assert note in run(capsys, *launch)[1]
    ours = "reward.custom_reward_function.path=pkg://verl_credit.turns.rollout.reward.qa"
    for given in ("algorithm.info_gain_template='#### {answer}'", "algorithm.turn_signal=tool_reward", ours):
        assert note not in run(capsys, *launch, given)[1]


@pytest.mark.parametrize(
    "estimator, operator, why",
    [("rloo", "rloo", "on top"), ("gae", "grpo", "no critic"), ("grppo", "grpo", "no such outcome operator")],
)
def test_an_estimator_is_replaced_aloud(estimator, operator, why, capsys):
    given = f"algorithm.adv_estimator={estimator}"
    _, printed = run(capsys, "--", given, "actor_rollout_ref.rollout.n=4", TOOLS)
    (line,) = (line for line in printed.splitlines() if line.startswith(f"  {given} -> "))
    assert f"algorithm.advantage_mode={operator}" in line and why in line


def test_five_typos_in_a_yaml_are_in_one_answer(capsys, tmp_path):
    typos = {"train_batch_siez": 1, "max_promt_length": 2, "shufle": 3, "truncatoin": 4, "val_fils": 5}
    (tmp_path / "mine.yaml").write_text(
        yaml.safe_dump({"defaults": ["ppo_trainer", "_self_"], "data": typos})
    )
    _, printed = run(capsys, "--config", str(tmp_path / "mine.yaml"), "--", "actor_rollout_ref.rollout.n=4")
    for name, value in typos.items():
        assert f"data.{name}={value}   (neither" in printed
    assert "did you mean data.train_batch_size?" in printed


ODD = ("data.train_batch_size=0", "actor_rollout_ref.actor.ppo_mini_batch_size=0", "trainer.nnodes=0")


@pytest.mark.parametrize("text", ["max_turns=many", "env.env_name=search env.max_steps=", "max_turns=-3"])
@pytest.mark.parametrize(
    "beside", [(), ("data.max_obs_length=x", *ODD), ("search.topk=0", "data.max_start_length=y")]
)
def test_odd_numbers_are_refused_and_never_a_traceback(text, beside, capsys):
    micro = "actor_rollout_ref.actor.ppo_micro_batch_size=8"
    assert run(capsys, "--", "actor_rollout_ref.rollout.n=4", *text.split(" "), *beside, micro)[0] == 4


@pytest.mark.slow
def test_run_adopts_each_launch_of_a_command_in_its_own_process(tmp_path, capfd):
    """The script really runs, so that its values come from a real shell; with --write nothing trains."""
    (tmp_path / "run.sh").write_text(
        f"for lr in 1e-6 2e-6; do {LAUNCH} {MICRO} actor_rollout_ref.actor.optim.lr=$lr; done\n"
    )
    file = tmp_path / "mine.yaml"
    assert main(["run", "--write", str(file), "--", "bash", str(tmp_path / "run.sh")]) == 0, (
        capfd.readouterr().out
    )
    rates = [
        yaml.safe_load(one.read_text())["actor_rollout_ref"]["actor"]["optim"]["lr"]
        for one in (file, tmp_path / "mine-2.yaml")
    ]
    assert [float(rate) for rate in rates] == [1e-6, 2e-6]
    assert main(["run", "--write", str(file), "--", "true"]) == 4
    assert f"--write={file}: " in capfd.readouterr().out
    assert main(["run", "--", "true"]) == 4
    assert "launched nothing" in capfd.readouterr().out


def test_adopt_with_train_starts_the_recipe_with_the_adopted_keys(capsys, monkeypatch):
    started = []
    monkeypatch.setattr("verl_credit.cli.train.train.train", lambda *given: started.append(given) or 1)
    assert run(capsys, "--train", "--", *LAUNCH.split()[3:], MICRO, TOOLS)[0] == 1
    ((recipe, folder, many, overrides),) = started
    assert (recipe, folder, many) == ("verl", None, False)
    assert {"algorithm.advantage_mode=grpo", "actor_rollout_ref.rollout.n=4", MICRO} <= {*overrides}
