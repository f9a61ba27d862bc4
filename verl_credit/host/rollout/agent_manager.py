"""Agent-loop workers that remember why a rollout failed, and a manager that hands it to the trainer.

Stock workers only log an exception of an agent loop or a reward function and mark the prompt a failure;
the trainer would pad the batch and go on.
"""

from __future__ import annotations

import traceback

import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from verl_credit.host.registry import register_parts, registered_names
from verl_credit.host.rollout import search_agent  # noqa: F401  (the import registers it)


@ray.remote
class CreditAgentLoopWorker(AgentLoopWorkerTQ.__ray_actor_class__):
    """verl's worker; exceptions are kept besides being raised."""

    def __init__(self, *args, **kwargs):
        register_parts()
        super().__init__(*args, **kwargs)
        self._errors: list[str] = []

    async def _run_agent_loop(self, sampling_params, trajectory, **kwargs):
        try:
            return await super()._run_agent_loop(sampling_params, trajectory, **kwargs)
        except Exception as error:
            frames = traceback.format_exception(error)
            self._errors.append(f"{type(error).__name__}: {error}\n{''.join(frames[-3:])}")
            raise

    def drain_errors(self) -> list[str]:
        """Errors since the last call."""
        errors, self._errors = self._errors, []
        return errors

    def credit_probe(self) -> dict[str, bool]:
        return registered_names()


class CreditAgentLoopManager(AgentLoopManagerTQ):
    """Configured as ``actor_rollout_ref.rollout.agent.agent_loop_manager_class``."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = CreditAgentLoopWorker

    def drain_errors(self) -> list[str]:
        errors = ray.get([worker.drain_errors.remote() for worker in self.agent_loop_workers])
        return [error for worker_errors in errors for error in worker_errors]

    def probe(self) -> list[dict[str, bool]]:
        return ray.get([worker.credit_probe.remote() for worker in self.agent_loop_workers])
