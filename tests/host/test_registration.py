"""The plugin is there in a fresh process, and says what is missing where it cannot work."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from ray import cloudpickle

from verl_credit.host.registry import LOOPS, LOSS, TRAINERS, require_registered
from verl_credit.host.rollout.agent_manager import CreditAgentLoopWorker


def python(code):
    command = [sys.executable, "-W", "ignore", "-c", code]
    environment = {**os.environ, "VERL_PLATFORM": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def imported():
    """What a process has after ``import verl``, and what it has once it also imports the class of a training worker."""
    return json.loads(
        python(
            "import json, sys, verl\n"
            "from verl.plugin.platform import get_platform\n"
            "ours = {name.split('.')[2] for name in sys.modules if name.startswith('verl_credit.host.')}\n"
            "alone = type(get_platform()).__name__, sorted(ours), 'verl_credit.credit' in sys.modules\n"
            "import verl_credit.host.actor.worker\n"
            "from torch.distributed.rendezvous import _rendezvous_handlers as torchs\n"
            "from verl_credit.host.registry import registered_names\n"
            "print(json.dumps([alone, {**registered_names(), 'loopback': 'loopback' in torchs}]))"
        )
    )


@pytest.mark.slow
def test_importing_verl_alone_registers_the_platform_and_imports_nothing_else_of_ours(imported):
    """Every process of a run imports verl; most use nothing of ours."""
    assert imported[0] == ["PlatformCPU", ["cpu", "external"], False]


@pytest.mark.slow
def test_a_training_worker_has_what_it_uses_once_its_class_is_imported(imported):
    assert {LOSS, "loopback"} <= {name for name, there in imported[1].items() if there}


@pytest.mark.slow
def test_an_agent_loop_worker_has_what_it_uses_once_it_is_made_and_registering_completes_that(tmp_path):
    """Ray pickles the class of an actor by value, so that the actor's process does not import the class's module."""
    pickled = tmp_path / "class"
    pickled.write_bytes(cloudpickle.dumps(CreditAgentLoopWorker.__ray_metadata__.modified_class))
    code = (
        "import json; from pathlib import Path; from ray import cloudpickle\n"
        f"Worker = cloudpickle.loads(Path({str(pickled)!r}).read_bytes())\n"
        "base = next(one for one in Worker.__mro__ if one.__name__ == 'AgentLoopWorkerTQ')\n"
        "base.__init__ = lambda self: None\n"
        "made = Worker().credit_probe()\n"
        "from verl_credit.host.process.verl_checks import register_all\n"
        "from verl_credit.host.registry import registered_names\n"
        "register_all(); register_all(); print(json.dumps([made, registered_names()]))"
    )
    made, completed = json.loads(python(code))
    assert {*LOOPS.values()} <= {name for name, there in made.items() if there}
    assert not all(made.values()) and all(completed.values())


def test_a_process_without_the_plugin_is_named():
    with pytest.raises(RuntimeError, match=r"worker 3: .*\['loss turn_ppo'\]"):
        trainers = dict.fromkeys(TRAINERS.values(), True)
        require_registered(
            "worker 3", {LOSS: False, **trainers, **dict.fromkeys(LOOPS.values(), False)}, LOSS, *trainers
        )


def test_estimator_without_turns_says_what_is_missing():
    from verl_credit.host.step.estimator import info_gain_advantage

    with pytest.raises(RuntimeError, match="set trainer.v1.trainer_mode=credit"):
        info_gain_advantage(torch.zeros(2, 3), torch.ones(2, 3), index=["a", "a"], config=None)


def test_loss_without_turns_says_what_is_missing():
    from verl_credit.host.actor.policy_loss import turn_ppo

    config = SimpleNamespace(policy_loss=SimpleNamespace(dynamic_clip=True, ratio_level="turn"))
    with pytest.raises(RuntimeError, match="set trainer.v1.trainer_mode=credit"):
        turn_ppo(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), config=config)
