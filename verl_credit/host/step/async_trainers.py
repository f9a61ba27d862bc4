"""verl's asynchronous trainers with turns; what they add to a step is in `ahead`."""

from __future__ import annotations

from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.utils.device import get_device_name

from verl_credit.host import compat
from verl_credit.host.actor.worker import CreditWorker
from verl_credit.host.step.trainer import CreditSteps
from verl_credit.names import COLOCATE_MODE, SEPARATE_MODE


@register_trainer(COLOCATE_MODE)
class CreditColocateAsync(CreditSteps, PPOTrainerColocateAsync):
    """Rollouts and updates take turns on the same devices. Rollouts that are not finished when a step has enough of them
    wait, and go on with the next weights."""

    VERL_MODE = "colocate_async"


class DetachedCreditWorker(CreditWorker, DetachActorWorker):
    """Uses verl's copies of the weights: all updates between two syncs have log-probs and gains of the last sync."""

    @property
    def copy_handler(self):
        """verl's copy of FSDP2's weights. On a CPU that is no copy: it would change with the weights."""
        copy = super().copy_handler

        def apart(module):
            weights, spec = copy(module)
            return {name: (weight.clone(), its) for name, (weight, its) in weights.items()}, spec

        return apart if get_device_name() == "cpu" else copy


@register_trainer(SEPARATE_MODE)
class CreditSeparateAsync(CreditSteps, PPOTrainerSeparateAsync):
    """Rollouts have devices of their own, and go on while others are trained on.

    A step has ``parameter_sync_step`` updates, each with credit of its own; then the weights are sent. The tables of a step
    are those of its last update.
    """

    VERL_MODE = "separate_async"
    WORKER = DetachedCreditWorker

    def _setup(self):
        compat.quiet_separate_async()
        super()._setup()
