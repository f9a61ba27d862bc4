"""The plugin is there in a fresh process, and says what is missing where it cannot work."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from verl_credit.host.registry import AGENT_LOOP, LOSS, TRAINER, require_registered


def python(code):
    command = [sys.executable, "-W", "ignore", "-c", code]
    environment = {**os.environ, "VERL_PLATFORM": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_importing_verl_alone_registers_estimator_and_loss():
    code = (
        "import verl\n"
        "from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn\n"
        "print(get_adv_estimator_fn('info_gain').__name__, get_policy_loss_fn('turn_ppo').__name__)"
    )
    assert python(code) == "info_gain_advantage turn_ppo"


@pytest.mark.slow
def test_registering_after_a_first_import_of_ours_completes_it():
    code = (
        "import verl_credit.host.actor.loss\n"
        "from verl_credit.host.process.register import register_all\n"
        "from verl_credit.host.registry import registered_names\n"
        "register_all(); register_all(); print(all(registered_names().values()))"
    )
    assert python(code) == "True"


def test_a_process_without_the_plugin_is_named():
    with pytest.raises(RuntimeError, match=r"not registered in worker 3: missing \['loss turn_ppo'\]"):
        require_registered("worker 3", {LOSS: False, TRAINER: True, AGENT_LOOP: False}, LOSS, TRAINER)


def test_estimator_without_turns_says_what_is_missing():
    from verl_credit.host.step.estimator import info_gain_advantage

    with pytest.raises(RuntimeError, match="set trainer.v1.trainer_mode=credit"):
        info_gain_advantage(torch.zeros(2, 3), torch.ones(2, 3), index=["a", "a"], config=None)


def test_loss_without_turns_says_what_is_missing():
    from verl_credit.host.actor.loss import turn_ppo

    config = SimpleNamespace(policy_loss=SimpleNamespace(dynamic_clip=True, ratio_level="turn"))
    with pytest.raises(RuntimeError, match="set trainer.v1.trainer_mode=credit"):
        turn_ppo(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), config=config)


def test_worker_loss_names_the_fields_that_did_not_arrive():
    from tensordict import TensorDict

    from verl_credit.host.actor.loss import credit_ppo_loss

    data = TensorDict({"turn_ids": torch.zeros(1, 2)}, batch_size=1)
    with pytest.raises(RuntimeError, match=r"\['clip_scale'\], which are not in the training batch"):
        credit_ppo_loss(None, {}, data)
