"""A trainer looks at its workers at the start, in every mode."""

from types import SimpleNamespace

import pytest
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from kit.recipes import load_config
from verl_credit.host.registry import ALL
from verl_credit.host.rollout.agent_manager import ERRORS, CreditAgentLoopManager
from verl_credit.host.step.async_trainers import CreditColocateAsync, CreditSeparateAsync
from verl_credit.host.step.trainer import CreditTrainer


class Workers:
    def __init__(self, loss):
        self.says = {**dict.fromkeys(ALL, True), "attention": "a", "log_probs": "l", "actor_loss": loss}

    def credit_probe(self):
        return [self.says]


@pytest.mark.parametrize("trainer", [CreditTrainer, CreditColocateAsync, CreditSeparateAsync])
def test_workers_that_train_with_another_loss_are_named(trainer, monkeypatch):
    def verls(self):
        self.actor_rollout_wg, self.ref_policy_wg = Workers(loss), "the reference's"

    verls_own = next(c for c in trainer.__mro__ if c.__module__.startswith("verl.") and "_setup" in vars(c))
    monkeypatch.setattr(verls_own, "_setup", verls)
    made = object.__new__(trainer)
    made.config, made.host = load_config("lab"), SimpleNamespace()
    loss = "credit_ppo_loss"
    made._setup()
    assert made.host.reference == "the reference's"
    assert made._worker_notes == {"attention": "a", "log_probs": "l"}
    loss = "ppo_loss"
    with pytest.raises(RuntimeError, match="worker 0 .* ppo_loss, not credit_ppo_loss"):
        made._setup()


@pytest.mark.parametrize("trainer", [CreditTrainer, CreditSeparateAsync])
def test_the_workers_of_every_role_that_there_is_are_ours(trainer, monkeypatch):
    monkeypatch.setattr(PPOTrainer, "_init_resource_pool_mgr", lambda self: None)
    monkeypatch.setattr("verl_credit.host.step.trainer.ray.remote", lambda worker: worker)
    made = object.__new__(trainer)
    made.config, made.role_worker_mapping = (
        load_config("lab"),
        {Role.ActorRollout: "verl's", "critic": "verl's"},
    )
    made._init_resource_pool_mgr()
    assert made.role_worker_mapping == {Role.ActorRollout: trainer.WORKER, "critic": "verl's"}


def test_errors_of_all_agent_loop_workers_reach_the_trainer(monkeypatch):
    monkeypatch.setattr("verl_credit.host.rollout.agent_manager.ray.get", lambda given: given)
    made = object.__new__(CreditAgentLoopManager)
    said = (["KeyError: a"], [], ["KeyError: b", "KeyError: c"])
    drains = [SimpleNamespace(remote=lambda kind, kept=kept: kept if kind == ERRORS else []) for kept in said]
    made.agent_loop_workers = [SimpleNamespace(drain=drain) for drain in drains]
    assert made.drain(ERRORS) == ["KeyError: a", "KeyError: b", "KeyError: c"]
