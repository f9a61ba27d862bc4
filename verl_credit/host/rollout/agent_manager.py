"""Failed rollouts: agent-loop workers keep the reason, a manager collects it, and the trainer watches while it waits.

verl's workers only log what an agent loop or a reward function raised, and mark the prompt as failed; its trainer would pad
the batch and go on. verl's replay buffer waits without end for prompts of a worker that has died.
"""

from __future__ import annotations

import copy
import time
import traceback
from collections.abc import Callable, Mapping

import ray
import torch
from ray.exceptions import RayActorError
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from verl_credit.errors import IntegrityError
from verl_credit.host.registry import register_parts, registered_names
from verl_credit.host.rollout.engine_client import apply_sampling_mode, fill_versions, row_client, seed_parts
from verl_credit.names import ROLLOUT_NAME, ROW_RECORD, SCORES, TURN_IDS, TURN_REWARDS
from verl_credit.turns.rollout.book import RowRecord, turn_ids_of, turns_of_mask
from verl_credit.turns.rollout.thoughts import TurnReader

ERRORS, HELD_OUT_FAULTS = "errors", "held_out_faults"


@ray.remote
class CreditAgentLoopWorker(AgentLoopWorkerTQ.__ray_actor_class__):
    """verl's worker. Agent loops of every author sample as the row's ``sampling`` says, and their rows have the weights'
    versions; exceptions are kept besides being raised, and rows with a tool fault are written without a mask."""

    def __init__(self, *args, **kwargs):
        # Here, because Ray pickles this class by value: its process need not import this module.
        from verl_credit.host.rollout import env_agent, search_agent  # noqa: F401  (the import registers the loops)
        from verl_credit.host.rollout.loop_maker import make_loops_directly

        register_parts()
        make_loops_directly()
        super().__init__(*args, **kwargs)
        self._kept: dict[str, list] = {ERRORS: [], HELD_OUT_FAULTS: []}

    async def _run_agent_loop(self, sampling_params, trajectory, **kwargs):
        row = copy.copy(self)  # verl gives the worker's client to the loop, and here each row has its own
        try:
            seeded = self.config.actor_rollout_ref.rollout.name == ROLLOUT_NAME
            parts = seed_parts(self.config, kwargs) if seeded else None  # vLLM dies of them (agent_loop.py)
            row.llm_client, row.versions = row_client(self.llm_client, parts)
            params = apply_sampling_mode(sampling_params, kwargs.get("sampling"))
            return await super(__class__, row)._run_agent_loop(params, trajectory, **kwargs)
        except Exception as error:
            frames = traceback.format_exception(error)
            loop = f"agent loop {kwargs.get('agent_name')}"
            self._kept[ERRORS].append(f"{loop}: {type(error).__name__}: {error}\n{''.join(frames[-3:])}")
            raise

    async def _agent_loop_postprocess(self, output, validate, **kwargs):
        outputs = output if isinstance(output, list) else [output]
        for one in outputs:
            fill_versions(one.extra_fields, self.versions, kwargs["global_steps"])
            one.extra_fields.setdefault(SCORES, {})  # verl copies it from the last output to the others
            given = one.extra_fields.get(ROW_RECORD)
            if given is None or (isinstance(given, Mapping) and "final_text" not in given):
                known = RowRecord(final_text=self._last_turn(one)).as_dict()
                one.extra_fields[ROW_RECORD] = known | dict(given or {})
        records = [one.extra_fields.get(ROW_RECORD) for one in outputs]
        faulty = [one for one in records if isinstance(one, Mapping) and one.get("tool_fault")]
        for one in outputs if faulty else ():
            # Masked as in our own loops, so that KL and entropy terms skip the rollout too.
            one.response_mask = [0] * len(one.response_mask)
            one.extra_fields[TURN_REWARDS] = []  # a reward of a turn without tokens is refused
        if faulty and validate:  # verl's evaluation hands on what the reward function returns, and no record
            fault = {name: faulty[0].get(name) for name in ("tool_fault", "fault_detail")}
            self._kept[HELD_OUT_FAULTS].append(fault)
        return await super()._agent_loop_postprocess(output, validate, **kwargs)

    def _last_turn(self, output) -> str:
        """The text of the last turn of a loop without a record: the only place where the reward may look for an answer."""
        mask_T = torch.tensor(output.response_mask, dtype=torch.long)
        turn_T = turns_of_mask(mask_T)
        if TURN_IDS in output.extra_fields:
            ids = turn_ids_of(output.extra_fields, 0, len(mask_T))
            turn_T = torch.where(mask_T.bool(), torch.tensor(ids, dtype=torch.long), -1)
        places = (turn_T == turn_T.max()).nonzero().flatten().tolist() if (turn_T >= 0).any() else []
        reader = TurnReader(self.tokenizer, self.config.search.include_reasoning)
        reader.after([*output.prompt_ids, *output.response_ids[: min(places, default=0)]])
        return reader.plain([output.response_ids[place] for place in places])

    async def _compute_score(self, outputs, kwargs):
        # verl's reward managers read the last output, in a mask that the longest prompt of all outputs shifts.
        return await super()._compute_score(outputs[-1:], kwargs)

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
        self.seen: Callable[[object], None] | None = None
        """Called with each sampled batch while its rows are still stored."""
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
            elif self.seen is not None:
                self.seen(batch[0])
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
