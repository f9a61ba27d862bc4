"""What `verl-credit twin` refuses before anything is built."""

import pytest

from kit.recipes import load_config
from verl_credit.cli import main
from verl_credit.cli.train import train as command
from verl_credit.errors import ConfigError, ExitCode, IntegrityError, PreflightError
from verl_credit.records.run.files import read_json_lines
from verl_credit.study.twin import Twin
from verl_credit.study.twin_check import check_twin

REFUSED = [
    "algorithm.use_kl_in_reward=true",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.shuffle=true",
    "actor_rollout_ref.rollout.temperature=0.7",
    "actor_rollout_ref.rollout.top_k=5",
    "trainer.n_gpus_per_node=2",
    "keep_rollouts.groups=null",
    "max_hours=2",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=3",
    "algorithm.rollout_correction.rollout_is=token",
    "reward.custom_reward_function.reward_kwargs.format_penalty=0.1",
    "reward.custom_reward_function.path=mine.py",
    "data.shuffle=false",
    "data.train_max_samples=8",
    "probe.every=5",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla",
]


@pytest.mark.parametrize("override", REFUSED)
def test_what_the_twin_would_leave_out_is_refused_by_its_key(override):
    with pytest.raises(ConfigError) as caught:
        check_twin(load_config("lab", [override]))
    assert caught.value.key == override.partition("=")[0]


@pytest.mark.parametrize(
    "error, code, reason",
    [
        (KeyboardInterrupt(), ExitCode.INTERRUPTED, "interrupted"),
        (IntegrityError("no gain"), ExitCode.INTEGRITY, "stopped by a fault"),
        (PreflightError("no lab"), ExitCode.PREFLIGHT, "refused"),
        (None, ExitCode.DONE, "done"),
    ],
)
def test_how_a_run_ended_is_in_its_events_and_trials(error, code, reason, tmp_path, monkeypatch):
    def train(config, progress, row, size):
        row.begin()
        if error:
            raise error
        return ExitCode.DONE, ""

    monkeypatch.setattr(command, "_run_twin", train)
    run_dir = tmp_path / "run"
    assert main(["twin", "--config-name", "lab", f"run_dir={run_dir}", f"lineage.dir={tmp_path}"]) == code
    start, end = read_json_lines(run_dir / "events.jsonl")
    assert start["command"].startswith("verl-credit twin --config-name lab") and end["reason"] == reason
    assert "\nrun\t" in (tmp_path / "results.tsv").read_text()


@pytest.mark.parametrize(
    "override, evaluated",
    [("val_before_train=true", [0, 2, 3]), ("val_before_train=false", [2, 3]), ("test_freq=-1", [0, 3])],
)
def test_when_it_evaluates(override, evaluated, tmp_path):
    twin, found = object.__new__(Twin), []
    own = ("trainer.total_training_steps=3", "trainer.test_freq=2", f"run_dir={tmp_path}")
    twin.config, twin.run_dir = load_config("lab", [*own, f"trainer.{override}"]), tmp_path
    twin.steps, twin.evaluate = lambda: ((step, {}) for step in (1, 2, 3)), found.append
    twin.run()
    assert found == evaluated


@pytest.mark.slow
def test_other_worlds_are_refused():
    with pytest.raises(ConfigError, match="lab"):
        check_twin(load_config("real_math_cpu"))


def test_a_folder_with_a_run_is_refused(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert main(["twin", "--config-name", "lab", f"run_dir={tmp_path}"]) == ExitCode.PREFLIGHT
    assert "has a run already" in capsys.readouterr().out
