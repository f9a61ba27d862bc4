"""A run whose length follows from its data says at its start what begins only after its last step."""

import json
from types import SimpleNamespace

import pytest
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from kit.recipes import load_config
from verl_credit.config.settings import CreditSettings
from verl_credit.host.rollout.agent_manager import CreditAgentLoopManager
from verl_credit.host.step import start
from verl_credit.host.step.trainer import CreditTrainer
from verl_credit.records.run.files import EVENTS


class Manager(CreditAgentLoopManager):
    def __init__(self):
        pass

    def probe(self):
        return []

    def drain(self, kind):
        return []


class Another:
    """A manager of somebody else with verl's interface alone."""

    def generate_sequences(self, prompts):
        pass


def notes(tmp_path, monkeypatch, *overrides, steps=40, manager=Manager, kind="idle"):
    """What `fit` says of itself before verl's own begins."""
    config = load_config("lab", [*overrides, f"run_dir={tmp_path}", "trainer.total_epochs=1"])
    trainer = object.__new__(CreditTrainer)
    trainer.config, trainer.settings = config, CreditSettings.from_config(config)
    trainer.total_training_steps, trainer.ahead = steps, None
    trainer.watch, trainer._worker_notes = SimpleNamespace(), {}
    monkeypatch.setattr(start, "of_rollout_server", lambda config, method: None)
    monkeypatch.setattr(PPOTrainerSync, "fit", lambda self, manager: None)
    trainer.fit(manager())
    assert trainer.watch.drain() == [] and trainer._drain("held_out_faults") == []
    rows = [json.loads(line) for line in (tmp_path / EVENTS).read_text().splitlines()]
    return [row["text"] for row in rows if row["kind"] == kind]


def test_what_a_manager_of_somebody_else_cannot_give_is_named_once(tmp_path, monkeypatch):
    (line,) = notes(tmp_path, monkeypatch, manager=Another, kind="agent_loops")
    key = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
    assert line.startswith(f"{key}={__name__}.Another is not watched: ")


@pytest.mark.parametrize(("overrides", "said"), [(("algorithm.turn_ids=mask",), ["turn_ids=mask"]), ((), [])])
def test_turns_that_follow_from_the_mask_are_named_at_the_start(tmp_path, monkeypatch, overrides, said):
    found = notes(tmp_path, monkeypatch, *overrides, kind="turn_ids")
    assert len(found) == len(said) and all(one in line for one, line in zip(said, found, strict=True))


ENDLESS = "trainer.total_training_steps=null"
CASES = [
    ((ENDLESS, "algorithm.info_gain_warmup_steps=40"), "no gain is measured in 40 steps"),
    ((ENDLESS, "probe.every=40"), "no update is measured in 40 steps"),
    ((ENDLESS, "probe.every=39"), ""),
    (("trainer.total_training_steps=40", "algorithm.info_gain_warmup_steps=40"), ""),  # said before the start
]


@pytest.mark.parametrize("overrides, said", CASES)
def test_what_begins_after_the_last_step_is_said_once(tmp_path, monkeypatch, overrides, said):
    found = notes(tmp_path, monkeypatch, *overrides)
    assert len(found) == bool(said)
    assert all(said in line and "(trainer.total_epochs=1)" in line for line in found)
