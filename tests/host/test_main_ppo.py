"""`python -m verl.trainer.main_ppo` with our keys becomes `verl-credit train`, or ends with one sentence."""

import os
import subprocess
import sys

import pytest

from verl_credit.host.process import main_ppo
from verl_credit.host.process.main_ppo import MODULE, arguments_of, hand_over, our_keys_in

LAUNCH = ["/bin/python3", "-W", "ignore", "-m", MODULE]


@pytest.fixture
def started(monkeypatch):
    """The command lines that take this process's place."""
    commands = []
    monkeypatch.setattr(os, "execv", lambda program, words: commands.append(words[1:]))
    return commands


@pytest.mark.parametrize(
    "command, arguments",
    [
        ([*LAUNCH, "a=1", "-m"], ["a=1", "-m"]),
        (["python", "verl/trainer/main_ppo.py", "a=1"], ["a=1"]),
        (["python", "-X", "dev", f"/x/{main_ppo.FILE}"], []),
        (["python", "-m", "verl_credit.cli", "main_ppo"], None),
        (["python", "-c", f"import {MODULE}"], None),
        (["python", "my/main_ppo.py", "a=1"], None),
        (["python", "-m"], None),
        (["python"], None),
        ([], None),
    ],
)
def test_only_the_launching_process_is_a_launch(command, arguments):
    assert arguments_of(command) == arguments


@pytest.mark.parametrize(
    "given, words",
    [
        (["--config-name=verl", "a=1"], ["train", "--config-name", "verl", "--", "a=1"]),
        (["-cn", "lab.yaml", "seed=1"], ["train", "--config-name", "lab", "--", "seed=1"]),
        (
            ["--config-dir", "{tmp}", "--config-name", "mine"],
            ["train", "--config-name", "mine", "--config-dir", "{tmp}", "--"],
        ),
        (
            ["--config-path={tmp}", "--config-name=mine"],
            ["train", "--config-name", "mine", "--config-dir", "{tmp}", "--"],
        ),
    ],
)
def test_a_launch_of_a_recipe_of_ours_becomes_train(given, words, started, tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("defaults: [base, _self_]\n")
    (tmp_path / "base.yaml").write_text("defaults: [verl, _self_]\n")
    hand_over([*LAUNCH, *(word.format(tmp=tmp_path) for word in given)])
    words = [word.format(tmp=tmp_path) for word in words]
    assert started == [["-m", "verl_credit.cli", *words]]
    assert "this launch runs as verl-credit train " in capsys.readouterr().out


@pytest.mark.parametrize(
    "given, says",
    [
        (
            ["algorithm.adv_estimator=info_gain"],
            "algorithm.adv_estimator=info_gain: --config-name=ppo_trainer has no defaults",
        ),
        (["+search.max_searches=2"], "+search.max_searches=2: --config-name=ppo_trainer"),
        (["trainer.v1.trainer_mode=credit"], "add --config-name=verl, or in a YAML of yours"),
        (["-cn", "lab.yaml", "-m", "seed=1,2"], "-m: `verl-credit train` makes one run"),
        (["--config-name=verl", "--cfg", "job"], "--cfg: `verl-credit train` has no such option of Hydra"),
    ],
)
def test_a_launch_that_cannot_work_ends_at_once_with_one_sentence(given, says, started, capsys):
    with pytest.raises(SystemExit) as end:
        hand_over([*LAUNCH, *given])
    (line,) = capsys.readouterr().out.splitlines()
    assert end.value.code == 4 and line.startswith("verl_credit: ") and says in line and not started


@pytest.mark.parametrize(
    "given",
    [
        [],
        ["--config-name=ppo_megatron_trainer.yaml", "algorithm.adv_estimator=grpo"],
        ["algorithm.gamma=0.9", "algorithm.norm_adv_by_std_in_grpo=false", "+my.seed=1"],
        ["--config-path=/nowhere", "--config-name=mine"],
        ["trainer.v1.trainer_mode=sync", "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent"],
        ["--cfg", "job"],
        ["-c", "job", "-h", "a=1"],
    ],
)
def test_a_launch_without_our_keys_is_left_to_verl(given, started, capsys):
    hand_over([*LAUNCH, *given])
    assert not started and capsys.readouterr().out == ""


def test_no_key_of_verls_own_makes_a_launch_ours():
    """A launch of stock verl may give every key of its own configuration."""
    from verl_credit.recipe.compose import defaults

    stock = [f"{key}={value.value}" for key, value in defaults().items() if value.of == "verl"]
    assert len(stock) > 300 and our_keys_in(stock) == []


@pytest.mark.slow
def test_verls_own_command_ends_with_our_refusal(tmp_path):
    """Python, verl and its plugin really run, and another process image takes over: five seconds of CPU."""
    command = [sys.executable, "-W", "ignore", "-m", MODULE, "--config-name=verl"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    refusal = "verl-credit train: actor_rollout_ref.rollout.n=1 "
    assert ended.returncode == 4 and ended.stdout.splitlines()[-1].startswith(refusal)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("write, how", [(None, ["--train"]), ("mine.yaml", ["--write", "mine.yaml"])])
def test_a_launch_below_run_trains_or_writes_its_recipe(write, how, started, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    main_ppo.adopt([*LAUNCH, "a=1"], MODULE, {"write": write, "noted": ""})
    assert started == [["-m", "verl_credit.cli", "adopt", "--entry", MODULE, *how, "--", "a=1"]]
