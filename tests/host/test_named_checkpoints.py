"""`keep_checkpoints`: which steps are saved, and which of them stay, over several starts and after a kill."""

import pytest
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager

from kit.checkpoints import save_step, write_actor
from kit.idle import without_effect
from kit.recipes import check, load_config
from verl_credit.errors import ConfigError
from verl_credit.host.step import recorded
from verl_credit.host.step.trainer import CreditSteps
from verl_credit.host.step.v1_host import V1Host
from verl_credit.records.run.files import METRICS, append_json, count_kept, count_written
from verl_credit.records.run.resume import resumes_from, saved_steps
from verl_credit.records.run.state import TRACKER


class Worker:
    """The actor's worker group of one process: verl's manager, as `FSDPCheckpointManager.save_checkpoint` calls it."""

    def __init__(self, folder):
        self._manager = object.__new__(BaseCheckpointManager)
        self._manager.previous_saved_paths = []
        self._folder, self.saved = folder, []

    def save(self, step, most, killed=None):
        path = self._folder / f"global_step_{step}" / "actor"
        self._manager.ensure_checkpoint_capacity(most)
        write_actor(path)
        self._manager.register_checkpoint(str(path), most)
        if killed == step:
            raise Killed
        save_step(self._folder, step)
        (self._folder / TRACKER).write_text(str(step))
        self.saved.append(step)


class Killed(Exception):
    """Between the weights and the rest, where verl would have deleted the weights of the step before."""


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Starts a process that makes the steps of verl's loop: it saves every ``save_freq`` steps, then `on_step_end`."""
    lab, folder = load_config("lab", [f"run_dir={tmp_path}"]), tmp_path / "checkpoints"

    def run(steps, *, save_freq, most, named=(), first=1, killed=None):
        worker = Worker(folder)
        trainer = object.__new__(type("Recorded", (CreditSteps, PPOTrainerSync), {}))
        trainer.config = lab.copy()
        trainer.config.keep_checkpoints, trainer.config.trainer.max_actor_ckpt_to_keep = list(named), most
        trainer.timing_raw, trainer.recorder = {}, recorded.Recorder(trainer.config)
        trainer.host = V1Host(trainer.config, None, None)
        trainer._metrics_to_save = dict
        monkeypatch.setattr(recorded, "save_state", lambda *_: None)
        monkeypatch.setattr(recorded, "of_rollout_server", lambda *_: None)
        monkeypatch.setattr(PPOTrainerSync, "on_step_end", lambda self: None)

        def save(self):
            limit = (
                1
                if self.config.trainer.remove_previous_ckpt_in_save
                else self.config.trainer.max_actor_ckpt_to_keep
            )
            worker.save(self.global_steps, limit, killed)

        monkeypatch.setattr(PPOTrainerSync, "_save_checkpoint", save)
        for step in range(first, steps + 1):
            trainer.global_steps = step
            if save_freq > 0 and (step == steps or step % save_freq == 0):
                trainer._save_checkpoint()
            trainer.on_step_end()
            append_json(tmp_path / METRICS, {"step": step})
        assert trainer.config.trainer.max_actor_ckpt_to_keep == most
        return worker.saved, saved_steps(folder)

    return run


@pytest.mark.parametrize(
    "save_freq, most, named, saved, there",
    [
        (2, 1, [], [2, 4, 6, 7], [7]),
        (2, 1, [3], [2, 3, 4, 6, 7], [3, 7]),
        (2, 2, [1, 4], [1, 2, 4, 6, 7], [1, 4, 6, 7]),
        (2, None, [3], [2, 3, 4, 6, 7], [2, 3, 4, 6, 7]),
        (-1, 1, [3, 5], [3, 5], [3, 5]),
        (-1, 1, [], [], []),
        (7, 1, [7], [7], [7]),
    ],
)
def test_named_steps_are_saved_once_and_stay(train, save_freq, most, named, saved, there):
    assert train(7, save_freq=save_freq, most=most, named=named) == (saved, there)
    assert count_written(7, save_freq, named) == len(saved)
    assert (
        len(there) <= count_kept(7, save_freq, most, named) <= len(there) + 1
    )  # a named one may be among the newest


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 2, None])
def test_a_kill_between_the_weights_and_the_tracker_leaves_a_run_that_goes_on(train, tmp_path, most):
    """With a limit of 1, verl's own manager would have deleted the only step that the tracker can name."""
    with pytest.raises(Killed):
        train(6, save_freq=2, most=most, killed=4)
    assert resumes_from(load_config("lab", [f"run_dir={tmp_path}"])).name == "global_step_2"
    saved, there = train(6, save_freq=2, most=most, first=3)
    assert saved == [4, 6] and there == [2, 4, 6][-(most or 3) :]


def test_the_limit_holds_over_several_starts(train):
    """verl's list of what it has saved begins empty in every process."""
    for first in (1, 3, 5):
        saved, there = train(first + 1, save_freq=1, most=2, first=first)
        assert there == saved == [first, first + 1]


@pytest.mark.parametrize("value", [[0], [1.5], 3, [-1], "all"])
def test_what_is_no_list_of_steps_is_refused(value):
    with pytest.raises(ConfigError) as error:
        check(f"keep_checkpoints={value}")
    assert (error.value.key, error.value.value) == ("keep_checkpoints", value)
    assert "a list of steps of at least 1" in error.value.accepted


def test_a_resume_may_not_delete_one():
    with pytest.raises(ConfigError, match=r"with keep_checkpoints=\[3\]") as error:
        check("keep_checkpoints=[3]", "trainer.del_local_ckpt_after_load=true")
    assert (error.value.key, error.value.value) == ("trainer.del_local_ckpt_after_load", True)
    assert "set it to false" in error.value.accepted


def test_steps_beyond_the_end_are_said():
    config = load_config("lab", ["keep_checkpoints=[3,9]", "trainer.total_training_steps=8"])
    assert "keep_checkpoints=[3, 9]: no step 9 in trainer.total_training_steps=8" in without_effect(config)
