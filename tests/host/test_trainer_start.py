"""A trainer looks at its workers at the start, in every mode."""

import pytest

from kit.recipes import load_config
from verl_credit.host.registry import ALL
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
        self.actor_rollout_wg = Workers(loss)

    verls_own = next(c for c in trainer.__mro__ if c.__module__.startswith("verl.") and "_setup" in vars(c))
    monkeypatch.setattr(verls_own, "_setup", verls)
    made = object.__new__(trainer)
    made.config = load_config("lab")
    loss = "credit_ppo_loss"
    made._setup()
    assert made._said == {"attention": "a", "log_probs": "l"}
    loss = "ppo_loss"
    with pytest.raises(RuntimeError, match="actor worker 0 trains with ppo_loss, not credit_ppo_loss"):
        made._setup()
