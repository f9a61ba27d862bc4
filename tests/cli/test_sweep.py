"""`train -m`: which runs there are, that all are checked first, and what the sweep's exit code says."""

import os
import signal
import sys
import threading
import time

import pytest

from kit.recipes import load_config
from verl_credit.cli import main
from verl_credit.cli.train import sweep as module
from verl_credit.cli.train.sweep import expand
from verl_credit.errors import ConfigError

MODES = "algorithm.info_gain_norm_mode=joint,separate,turn-group,turn-group-v1d"
LAB = ["lab.size=tiny", "trainer.total_training_steps=2"]


def test_every_combination_once_the_last_key_fastest():
    runs = expand([MODES, "seed=1,2,3", "trainer.total_training_steps=2"])
    assert len(runs) == 12 and len({name for name, _ in runs}) == 12
    name, overrides = runs[1]
    assert name == "info_gain_norm_mode=joint,seed=2"
    assert overrides == ["algorithm.info_gain_norm_mode=joint", "seed=2", "trainer.total_training_steps=2"]


def test_what_is_not_a_sweep_stays_as_it_was_written():
    lists = ["evaluation.modes=[greedy,sampled]", "algorithm.strategic_grams='let me, hold on'"]
    assert expand(lists) == [("", lists)]


@pytest.mark.parametrize(
    "overrides, names",
    [
        (["data.seed=1,2", "actor_rollout_ref.rollout.seed=3"], ["seed=1", "seed=2"]),
        (
            ["data.seed=1,2", "rollout.seed=3,4"],
            [f"data.seed={i},rollout.seed={k}" for i in (1, 2) for k in (3, 4)],
        ),
        (["seed=range(1,4)"], ["seed=1", "seed=2", "seed=3"]),
        (["credit=grpo,paper"], ["credit=grpo", "credit=paper"]),
        (["seed=1", "seed=2", "data.seed=3,4"], ["seed=3", "seed=4"]),  # the last one counts, as in Hydra
    ],
)
def test_names_of_runs(overrides, names):
    assert [name for name, _ in expand(overrides)] == names


def test_what_hydra_cannot_parse_is_a_config_error():
    with pytest.raises(ConfigError, match="overrides"):
        expand(["seed=[1,2"])


def sweep(name, overrides):
    return main(["train", "-m", "--config-name", name, *overrides])


@pytest.fixture
def started(monkeypatch):
    """Commands that would have run, and the exit codes they are given."""
    commands, codes = [], []

    def run(command):
        commands.append(command)
        return codes.pop(0) if codes else 0

    monkeypatch.setattr(module, "run_child", run)
    monkeypatch.setattr("verl_credit.recipe.doctor.network.ray_on_loopback", lambda environment: None)
    return commands, codes


@pytest.mark.slow
def test_each_run_has_a_folder_of_its_own_that_hydra_reads_back(started, tmp_path):
    commands, _ = started
    assert sweep("lab", [*LAB, MODES, f"run_dir={tmp_path}"]) == 0
    assert len(commands) == 4
    for command, mode in zip(commands, ("joint", "separate", "turn-group", "turn-group-v1d"), strict=True):
        assert command[:6] == [sys.executable, "-m", "verl_credit.cli", "train", "--config-name", "lab"]
        config = load_config("lab", command[6:])
        assert config.run_dir == str(tmp_path / f"info_gain_norm_mode={mode}")
        assert config.algorithm.info_gain_norm_mode == mode
        # the clip range follows gains where the mode gives turns a scale, and nowhere else
        assert config.actor_rollout_ref.actor.policy_loss.dynamic_clip is (mode == "turn-group-v1d")


@pytest.mark.slow
def test_nothing_starts_when_one_of_the_runs_could_not(started, capsys):
    commands, _ = started
    assert sweep("lab", [*LAB, "algorithm.info_gain_norm_mode=joint,separated"]) == 4
    assert commands == []
    assert "info_gain_norm_mode=separated: " in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "ends, code, made",
    [([0, 5, 0], 5, 3), ([3, 0, 3], 0, 3), ([0, 130], 130, 2), ([0, 4], 4, 2)],
    ids=["a failure stops no other", "finished before", "Ctrl-C", "cannot start"],
)
def test_how_runs_end_a_sweep(started, capsys, ends, code, made):
    commands, codes = started
    codes += ends
    assert sweep("lab", [*LAB, "seed=1,2,3"]) == code and len(commands) == made
    assert made < 3 or f"seed=2: exit code {ends[1]}" in capsys.readouterr().out


RUN = """
import os, signal, sys, time
def stop(*_):
    time.sleep(1.0)  # Ray, the retriever, the report
    open(sys.argv[1], "w").write("cleaned up")
    sys.exit(130)
for name in (signal.SIGINT, signal.SIGTERM):
    signal.signal(name, stop)
open(sys.argv[1] + ".pid.partial", "w").write(str(os.getpid()))
os.rename(sys.argv[1] + ".pid.partial", sys.argv[1] + ".pid")
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_told_to_stop_is_given_the_time_it_needs(tmp_path, number):
    file, pid = tmp_path / "left", tmp_path / "left.pid"

    def tell():
        while not pid.exists():
            time.sleep(0.02)
        if number == signal.SIGINT:  # a terminal tells the run and us
            os.kill(int(pid.read_text()), number)
        os.kill(os.getpid(), number)

    threading.Thread(target=tell).start()
    assert module.run_child([sys.executable, "-c", RUN, str(file)]) == 130
    assert file.read_text() == "cleaned up"


@pytest.mark.slow
def test_runs_that_would_share_their_checkpoints_are_refused(started, capsys, tmp_path):
    commands, _ = started
    own = [*LAB, f"run_dir={tmp_path}/runs", "seed=1,2"]
    assert sweep("lab", [*own, f"trainer.default_local_dir={tmp_path}/all"]) == 4
    assert commands == []
    assert "seed=1 and seed=2 would share their checkpoints" in capsys.readouterr().out
    assert sweep("lab", [*own, "trainer.default_local_dir=${run_dir}/elsewhere"]) == 0 and len(commands) == 2


@pytest.mark.parametrize("second", ["seed=3,4", "seed=3", "++seed=3"])
def test_a_key_that_is_swept_stands_there_once(second):
    with pytest.raises(ConfigError) as caught:
        expand(["seed=1,2", second])
    assert caught.value.key == "seed" and "seed=1,2,3" in caught.value.accepted


@pytest.mark.parametrize("values", ["'let me','let_me'", "a,a"])
def test_runs_whose_folders_would_have_one_name_are_refused(started, capsys, values):
    commands, _ = started
    assert sweep("lab", [*LAB, f"algorithm.strategic_grams={values}"]) == 4
    assert commands == []
    said = capsys.readouterr().out
    name = "strategic_grams=_let_me_" if "let" in values else "strategic_grams=a"
    assert f"2 runs would be in the folder {name}" in said and len(said.splitlines()) == 1


def test_a_run_s_folder_has_a_name_that_the_file_system_takes(started, capsys):
    commands, _ = started
    long = "é" * 118
    assert len(expand([f"algorithm.strategic_grams='{long}',b"])) == 2  # 254 bytes
    assert sweep("lab", [*LAB, f"algorithm.strategic_grams='{long}{long}',b"]) == 4
    assert commands == [] and "the file system takes 255" in capsys.readouterr().out


@pytest.mark.slow
def test_a_quote_in_a_folder_s_name_is_read_back(started, tmp_path):
    commands, _ = started
    folder = tmp_path / "mine's \\'"
    assert sweep("lab", [*LAB, "seed=1,2", f'run_dir="{folder}"']) == 0
    found = [load_config("lab", command[6:]).run_dir for command in commands]
    assert found == [str(folder / f"seed={seed}") for seed in (1, 2)]
