"""Held-out evaluation: modes in rows and metrics; ``evaluation.max_hours`` ends a longer one, and its result is kept."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from kit.recipes import check
from verl_credit.errors import EvaluationOverrun, IntegrityError
from verl_credit.host.step import held_out
from verl_credit.host.step.trainer import CreditSteps
from verl_credit.records.run import events
from verl_credit.records.run.files import EVENTS, VALIDATION, read_json_lines
from verl_credit.records.run.validation import read_held_out

ROWS = [{"raw_prompt": [1, 2]}, {"raw_prompt": [3, 4]}]


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    """Its evaluation reads every batch; a batch takes 36 minutes."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    trainer = object.__new__(type("Evaluating", (CreditSteps, PPOTrainerSync), {}))
    trainer.batches = Counter()

    def validate(self):
        for batch in self.val_dataloader:
            trainer.batches[batch["sampling"][0]] += 1
            clock.now += 0.6 * 3600
        share = len(trainer.faulty) / len(self.val_dataset)
        name = f"val-aux/lab-{self.evaluation.mode}"
        return {f"{name}/em/mean@1": 0.5} | ({f"{name}/tool_fault/mean@1": share} if trainer.faulty else {})

    monkeypatch.setattr(held_out, "time", clock)
    monkeypatch.setattr(PPOTrainerSync, "_validate", validate)
    trainer.global_steps, trainer.val_dataset, trainer.val_dataloader = 5, [1] * 4, ROWS
    trainer.tokenizer, trainer.watch = (
        None,
        SimpleNamespace(begin=lambda rows: None, settle=lambda rows: None, errors=(), seen=None),
    )
    trainer.faulty = []
    trainer._drain = lambda kind: trainer.faulty
    trainer.config = check(f"run_dir={tmp_path}")
    OmegaConf.set_struct(trainer.config, False)
    trainer.evaluation = held_out.Evaluation(trainer.config, trainer.watch)
    return trainer


def test_a_longer_evaluation_ends_before_its_next_batch(trainer):
    trainer.config.evaluation.max_hours = 1.5
    with pytest.raises(EvaluationOverrun, match=r"evaluation.max_hours=1.5: .* step 5"):
        trainer._validate()
    assert trainer.batches == {"greedy": 2, "sampled": 1} and trainer.val_dataloader is ROWS
    (note,) = read_json_lines(trainer.evaluation.run_dir / EVENTS)
    assert (
        note["kind"] == events.EVALUATION_OVERRUN and not (trainer.evaluation.run_dir / VALIDATION).exists()
    )


def test_one_that_ends_too_late_is_written_down_first(trainer):
    trainer.config.evaluation.max_hours = 2.0
    with pytest.raises(EvaluationOverrun):
        trainer._validate()
    (row,) = read_json_lines(trainer.evaluation.run_dir / VALIDATION)
    assert row["step"] == 5 and row["val-aux/lab-sampled/em/mean@1"] == 0.5
    assert trainer._validate() == {
        name: value for name, value in row.items() if name != "step"
    }  # not made again


def test_a_stop_after_faults_names_the_cause_that_was_seen_most(trainer):
    other = "http://x: answers from index 'b'; search.index_fingerprint=a"
    seen = [("connect", "refused"), ("bad_answer", other), ("bad_answer", other)]
    trainer.faulty = [{"tool_fault": code, "fault_detail": detail} for code, detail in seen]
    with pytest.raises(IntegrityError, match="tool_fault/mean@1 = 0.750 of the rows") as stopped:
        trainer._validate()
    assert f": 2 bad_answer, 1 connect (most often: {other}); a share of 0.25" in str(stopped.value)
    assert not (trainer.evaluation.run_dir / VALIDATION).exists()


def test_the_generations_of_each_mode_have_a_file(trainer, tmp_path, monkeypatch):
    """verl's name for both is the step's: the sampled ones would overwrite the greedy ones."""
    folder = tmp_path / "validation"

    def validate(self):
        self._dump_generations(["q"], [f"a {self.evaluation.mode}"], ["a"], [1.0], {}, str(folder))
        return {}

    monkeypatch.setattr(PPOTrainerSync, "_validate", validate)
    trainer._init_dump_executor()
    trainer._validate()
    trainer._shutdown_dump_executor()
    found = {path.parent.name: read_json_lines(path) for path in folder.rglob("5.jsonl")}
    assert {mode: row["output"] for mode, (row,) in found.items()} == {
        "greedy": "a greedy",
        "sampled": "a sampled",
    }


def test_evaluation_rows_carry_their_mode_and_keep_their_source():
    batches = [{"raw_prompt": np.array([1, 2]), "data_source": np.array(["nq", "lab"], dtype=object)}]
    (batch,) = held_out.with_mode(batches, "sampled", 3, lambda: None)
    assert batch["sampling"].tolist() == ["sampled"] * 2 and batch["data_source"].tolist() == ["nq", "lab"]
    assert batch["__rollout_n__"].tolist() == [3, 3]
    assert "sampling" not in batches[0]


def test_a_question_has_one_greedy_trajectory_and_as_many_sampled_ones_as_the_recipe_says(trainer):
    expected = []
    trainer.watch.begin = expected.append
    trainer.config.actor_rollout_ref.rollout.val_kwargs.n = 3
    trainer._validate()
    assert expected == [4, 12]


@pytest.mark.parametrize("keep", [True, False])
def test_the_trajectories_of_all_modes_are_written_together(trainer, monkeypatch, keep):
    """They are read when a batch is sampled, because verl clears it before its metrics are there."""
    monkeypatch.setattr(held_out, "held_out_rows", lambda batch, mode, *_: [{"id": batch, "mode": mode}])
    before = PPOTrainerSync._validate

    def validate(self):
        if self.watch.seen is not None:
            self.watch.seen("a batch")
        return before(self)

    monkeypatch.setattr(PPOTrainerSync, "_validate", validate)
    trainer.config.evaluation.keep_trajectories = keep
    trainer._validate()
    written = [{"id": "a batch", "mode": mode} for mode in ("greedy", "sampled")]
    assert read_held_out(trainer.evaluation.run_dir, 5) == (written if keep else [])
    assert trainer.watch.seen is None


def labelled(trainer, monkeypatch, update):
    """Metrics of an evaluation in the mode "greedy", with ``update`` in place of verl's."""
    monkeypatch.setattr(PPOTrainerSync, "_val_metrics_update", staticmethod(update))
    trainer.evaluation.mode = "greedy"
    return trainer._val_metrics_update


def test_metrics_of_an_evaluation_are_named_after_its_mode(trainer, monkeypatch):
    def update(sources, uids, infos, turns, expected_acc_counts):
        assert expected_acc_counts == {("lab-greedy", "u"): 1}
        return {f"val-core/{sources[0]}/em/mean@1": 1.0, "val-aux/num_turns/mean": 2}

    named = labelled(trainer, monkeypatch, update)(
        ["lab"] * 3, ["u", "u", "v"], {}, [], expected_acc_counts={("lab", "u"): 1}
    )
    assert named == {
        "val-core/lab-greedy/em/mean@1": 1.0,
        "val-aux/lab-greedy/questions": 2,
        "val-aux/num_turns-greedy/mean": 2,
    }


def test_a_list_per_turn_among_the_rewards_values_does_not_end_the_evaluation(trainer, monkeypatch):
    """verl takes means of whatever a reward function returns, and refuses lists of different length."""
    from verl.trainer.ppo.metric_utils import process_validation_metrics

    def update(sources, uids, infos, turns, expected_acc_counts):
        found = process_validation_metrics(sources, uids, infos)
        return {f"{name}/mean": infos["reward"] for name in found[sources[0]]}

    infos = {
        "reward": [1.0, 0.0, None],
        "pred": ["a", "b", "c"],
        "steps": [[0.5, None], [0.1], []],
        "shown": [np.zeros(2), None, np.zeros(1)],
        "said": [{"a": 1}, {}, None],
    }
    named = labelled(trainer, monkeypatch, update)(
        ["lab"] * 3, ["u"] * 3, infos, [], expected_acc_counts=None
    )
    assert set(named) == {"reward/mean", "val-aux/lab-greedy/questions"}
