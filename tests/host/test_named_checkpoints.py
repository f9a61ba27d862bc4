"""`keep_checkpoints`: which steps are saved, and which of them verl's own checkpoint manager leaves alone."""

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager

from kit.idle import without_effect
from kit.recipes import check, load_config
from verl_credit.errors import ConfigError
from verl_credit.host.actor.worker import keep_checkpoint
from verl_credit.host.step import recorded
from verl_credit.records.run.files import count_kept, count_written


class Worker:
    """The actor's worker group: verl's manager over folders, as `FSDPCheckpointManager.save_checkpoint` calls it."""

    def __init__(self, folder, most):
        manager = object.__new__(BaseCheckpointManager)
        manager.previous_saved_paths = []
        self.engine = SimpleNamespace(checkpoint_manager=manager)
        self._folder, self._most = folder, most
        self.saved = []

    def save(self, step):
        manager, path = self.engine.checkpoint_manager, self._folder / f"global_step_{step}" / "actor"
        manager.ensure_checkpoint_capacity(self._most)
        path.mkdir(parents=True)
        manager.register_checkpoint(str(path), self._most)
        self.saved.append(step)

    def keep_checkpoint(self, step):
        keep_checkpoint(self.engine, step)

    @property
    def there(self):
        return sorted(int(path.parent.name.split("_")[-1]) for path in self._folder.glob("*/actor"))


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Steps of verl's loop: it saves every ``save_freq`` steps, then `on_step_end`."""

    def run(steps, *, save_freq, most, named):
        folder = tmp_path / "checkpoints"
        worker = Worker(folder, most)
        trainer = object.__new__(type("Recorded", (recorded.RecordedTrainer, PPOTrainerSync), {}))
        trainer.config = OmegaConf.create(
            {
                "keep_checkpoints": named,
                "run_dir": str(tmp_path),
                "trainer": {"default_local_dir": str(folder)},
            }
        )
        trainer.actor_rollout_wg, trainer.timing_raw, trainer._saved_step = worker, {}, None
        trainer.controller, trainer._metrics_but_times = None, dict
        trainer.total_training_steps, trainer._shortened_from, trainer._weights = steps, None, None
        monkeypatch.setattr(recorded, "save_state", lambda *_: None)
        monkeypatch.setattr(recorded.RecordedTrainer, "_rollout_checksum", lambda self: None)
        monkeypatch.setattr(PPOTrainerSync, "on_step_end", lambda self: None)
        monkeypatch.setattr(PPOTrainerSync, "_save_checkpoint", lambda self: worker.save(self.global_steps))
        for step in range(1, steps + 1):
            trainer.global_steps = step
            if save_freq > 0 and (step == steps or step % save_freq == 0):
                trainer._save_checkpoint()
            trainer.on_step_end()
        return worker

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
    worker = train(7, save_freq=save_freq, most=most, named=named)
    assert (worker.saved, worker.there) == (saved, there)
    assert count_written(7, save_freq, named) == len(saved)
    assert (
        len(there) <= count_kept(7, save_freq, most, named) <= len(there) + 1
    )  # a named one may be among the newest


def test_how_many_stay_when_the_number_of_steps_is_not_known():
    assert (
        count_kept(None, 5, 2, [3]) == 3
        and count_kept(None, 5, None, [3]) is None
        and count_kept(None, -1, 2, [3]) == 1
    )


def test_an_engine_whose_checkpoints_cannot_be_kept_says_so():
    with pytest.raises(RuntimeError, match="keep_checkpoints: SimpleNamespace"):
        keep_checkpoint(SimpleNamespace(), 3)


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
