"""Ids of prompts follow from seed, step and place: a run that goes on issues none that its checkpoint may hold."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from kit.recipes import load_config
from verl_credit.host.step.async_trainers import CreditColocateAsync
from verl_credit.host.step.trainer import CreditTrainer

KINDS = {"credit": CreditTrainer, "credit_colocate_async": CreditColocateAsync}
BATCH, STEPS = 4, 5


@pytest.fixture
def issued(tmp_path, monkeypatch):
    """(mode, the step of the checkpoint, batches ahead): the ids that each step issued, in verl's own loop."""
    monkeypatch.setattr(trainer_base, "SkipManager", SimpleNamespace(init=id, set_step=id))
    for logger in ("Tracking", "ValidationGenerationsLogger", "DapoFilteredRewardTableLogger"):
        monkeypatch.setattr(trainer_base, logger, lambda *_, **__: SimpleNamespace(log=lambda **_: None))
    monkeypatch.setattr(trainer_base, "marked_timer", lambda *_, **__: nullcontext())
    monkeypatch.setattr(trainer_base.tq, "kv_clear", lambda **_: None)
    monkeypatch.setattr(PPOTrainer, "__init__", lambda self, config: setattr(self, "config", config))

    def run(mode, resumed_from, ahead):
        trainer = KINDS[mode](
            load_config(
                "lab",
                [
                    *(
                        f"run_dir={tmp_path}",
                        f"trainer.v1.trainer_mode={mode}",
                        "trainer.val_before_train=false",
                    ),
                    *(f"data.train_batch_size={BATCH}", "trainer.test_freq=-1", "trainer.save_freq=-1"),
                    f"trainer.v1.colocate_async.num_warmup_batches={ahead}",
                ],
            )
        )
        found = {}

        def submit(batch):
            found.setdefault(trainer.global_steps, []).extend(batch["uid"])

        trainer.train_dataloader_it = iter([{"raw_prompt": ["?"] * BATCH}] * 100)
        trainer.global_steps, trainer.total_training_steps, trainer.steps_per_epoch = resumed_from, STEPS, 100
        trainer._restored_tq_prompt_count = trainer.curr_step_profile = 0
        trainer._submit_batch_to_rollout = submit
        trainer._start_profiling = trainer._stop_profiling = trainer.on_step_end = lambda: None
        trainer._reissue_inflight_prompts = trainer._shutdown_dump_executor = trainer.on_step_begin = lambda: (
            None
        )
        trainer._consume_sync_metrics = dict
        trainer._compute_metrics = lambda *_, **__: None
        trainer.step = lambda *_: (
            trainer._add_prompts_to_generate(BATCH) or SimpleNamespace(keys=[], partition_id="")
        )
        PPOTrainer.fit(trainer, None)
        return found

    return run


@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize("before", KINDS)
def test_a_resumed_run_issues_no_id_that_was_issued_before_its_checkpoint(issued, before, ahead):
    first = issued(before, 0, 1)
    again = issued("credit_colocate_async", 2, ahead)
    assert len(again[3]) == (ahead + 1) * BATCH and list(again) == [3, 4, 5]
    old, new = ({*first[1], *first[2]}, [uid for step in again.values() for uid in step])
    assert not old.intersection(new) and len(new) == len(set(new))
