"""The process that owns the training loop: verl's task runner with the plugin registered for certain."""

from __future__ import annotations

import ray
from verl.trainer.main_ppo import TaskRunnerV1

from verl_credit.host.process.hide_secrets import hide_secrets
from verl_credit.host.process.register import register_all
from verl_credit.host.registry import registered_names, require_registered


@ray.remote(num_cpus=1)
class CreditTaskRunner(TaskRunnerV1.__ray_actor_class__):
    def run(self, config):
        register_all()
        require_registered("the task runner", registered_names())
        hide_secrets()
        return super().run(config)
