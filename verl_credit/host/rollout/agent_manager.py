"""Failed rollouts: agent-loop workers keep the reason, a manager collects it, and the trainer watches while it waits.

verl's workers only log what an agent loop or a reward function raised, and mark the prompt as failed; its trainer would pad
the batch and go on. verl's replay buffer waits without end for prompts of a worker that has died.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping

import ray
from ray.exceptions import RayActorError
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from verl_credit.errors import IntegrityError
from verl_credit.host.registry import register_parts, registered_names
from verl_credit.names import ROW_RECORD, TURN_REWARDS

ERRORS, HELD_OUT_FAULTS = "errors", "held_out_faults"


@ray.remote
class CreditAgentLoopWorker(AgentLoopWorkerTQ.__ray_actor_class__):
    """verl's worker; exceptions are kept besides being raised, and rows with a tool fault are written without a mask."""

    def __init__(self, *args, **kwargs):
        # Here, because Ray pickles this class by value: its process need not import this module.
        from verl_credit.host.rollout import env_agent, search_agent  # noqa: F401  (the import registers the loops)

        register_parts()
        super().__init__(*args, **kwargs)
        self._kept: dict[str, list] = {ERRORS: [], HELD_OUT_FAULTS: []}

    async def _run_agent_loop(self, sampling_params, trajectory, **kwargs):
        try:
            return await super()._run_agent_loop(sampling_params, trajectory, **kwargs)
        except Exception as error:
            frames = traceback.format_exception(error)
            self._kept[ERRORS].append(f"{type(error).__name__}: {error}\n{''.join(frames[-3:])}")
            raise

    async def _agent_loop_postprocess(self, output, validate, **kwargs):
        for one in output if isinstance(output, list) else [output]:
            record = one.extra_fields.get(ROW_RECORD)
            if isinstance(record, Mapping) and record.get("tool_fault"):
                # Masked as in our own loops, so that KL and entropy terms skip the row too.
                one.response_mask = [0] * len(one.response_mask)
                one.extra_fields[TURN_REWARDS] = []  # a reward of a turn without tokens is refused
                if validate:  # verl's evaluation hands on what the reward function returns, and no record
                    fault = {name: record.get(name) for name in ("tool_fault", "fault_detail")}
                    self._kept[HELD_OUT_FAULTS].append(fault)
        return await super()._agent_loop_postprocess(output, validate, **kwargs)

    def drain(self, kind: str) -> list:
        """Returns what was kept since the last call."""
        kept, self._kept[kind] = self._kept[kind], []
        return kept

    def credit_probe(self) -> dict[str, bool]:
        return registered_names()


class CreditAgentLoopManager(AgentLoopManagerTQ):
    """Collects what workers keep. The key ``actor_rollout_ref.rollout.agent.agent_loop_manager_class`` selects it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = CreditAgentLoopWorker

    def drain(self, kind: str) -> list:
        """`ERRORS` of rollouts (texts), or the tool faults of held-out rows, of all workers since the last call."""
        of_each = ray.get([worker.drain.remote(kind) for worker in self.agent_loop_workers])
        return [one for of_worker in of_each for one in of_worker]

    def probe(self) -> list[dict[str, bool]]:
        return ray.get([worker.credit_probe.remote() for worker in self.agent_loop_workers])


class RolloutWatch:
    """Collects the errors of one phase (a step's rollouts, an evaluation) and stops early when they are too many.

    While the trainer waits, it collects at most every ``every_s`` seconds.
    """

    def __init__(self, tolerated_share: float, *, every_s: float = 2.0) -> None:
        self.tolerated_share, self.every_s = tolerated_share, every_s
        self.drain: Callable[[], list[str]] | None = None
        self.errors: list[str] = []
        self.expected = 0
        self._last = float("-inf")

    def begin(self, expected: int) -> None:
        """Begins a new phase of ``expected`` rollouts."""
        self.errors, self.expected = [], expected

    def settle(self, arrived: int) -> int:
        """Ends the phase and returns the number of failed rollouts. Raises IntegrityError above the tolerated share."""
        self._collect()
        return check_rollouts(self.expected, arrived, self.errors, self.tolerated_share)

    def _collect(self) -> None:
        try:
            self.errors += self.drain()
        except RayActorError as error:
            raise IntegrityError(f"an agent-loop worker died (out of memory?): {error}") from error
        check_rollouts(self.expected, self.expected - len(self.errors), self.errors, self.tolerated_share)

    def attach(self, buffer) -> None:
        """Wrap the buffer's wait and sample: verl gives no hook between polls."""
        wait, sample = buffer._wait_for_next_poll, buffer.sample

        def watched_wait(*args, **kwargs):
            result, now = wait(*args, **kwargs), time.monotonic()
            if self.drain is not None and now - self._last >= self.every_s:
                self._last = now
                self._collect()
            return result

        def watched_sample(*args, **kwargs):
            # Where too few rollouts or none are left, verl raises or goes on with an empty batch.
            try:
                batch = sample(*args, **kwargs)
            except (RuntimeError, ValueError):
                self._collect()  # the cause, if it was an error of a rollout
                raise
            if not batch[0].keys:
                self._collect()
            return batch

        buffer._wait_for_next_poll, buffer.sample = watched_wait, watched_sample


def check_rollouts(expected: int, arrived: int, errors: list[str], tolerated_share: float) -> int:
    """Number of rollouts that never arrived. Raises when their share is above what the user tolerates."""
    failed = max(expected - arrived, len(errors))
    if failed > tolerated_share * expected:
        first = errors[0] if errors else "no exception was recorded; see the Ray worker logs"
        raise IntegrityError(
            f"{failed} of {expected or failed} rollouts raised (an agent loop or the reward function), "
            f"faults.max_failed_rollouts={tolerated_share:g} tolerates a share of {tolerated_share:g}. "
            f"First error: {first}"
        )
    return failed
