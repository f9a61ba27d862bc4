"""Agent-loop workers that remember why a rollout failed, and a manager that hands it to the trainer.

Stock workers only log an exception of an agent loop or a reward function and mark the prompt a failure;
the trainer would pad the batch and go on.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping

import ray
from verl.experimental.agent_loop import AgentLoopOutput
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from verl_credit.host.registry import register_parts, registered_names
from verl_credit.host.rollout import search_agent  # noqa: F401  (the import registers it)
from verl_credit.names import ROW_RECORD, TURN_REWARDS


def mask_lost_row(output: AgentLoopOutput) -> None:
    """As our own loops do: no token of a row with a tool fault is trained on, by KL and entropy terms neither."""
    record = output.extra_fields.get(ROW_RECORD)
    if isinstance(record, Mapping) and record.get("tool_fault"):
        output.response_mask = [0] * len(output.response_mask)
        output.extra_fields[TURN_REWARDS] = []  # turns without a token are none


@ray.remote
class CreditAgentLoopWorker(AgentLoopWorkerTQ.__ray_actor_class__):
    """verl's worker; exceptions are kept besides being raised, and rows with a tool fault are written without a mask."""

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

    async def _agent_loop_postprocess(self, output, validate, **kwargs):
        for one in output if isinstance(output, list) else [output]:
            mask_lost_row(one)
        return await super()._agent_loop_postprocess(output, validate, **kwargs)

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
