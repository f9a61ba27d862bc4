"""Watching rollouts while the trainer waits for them: what raised, and whether the workers still live.

verl's replay buffer waits without end for prompts of a worker that has died, and reports nothing of what a
reward function or an agent loop raised.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ray.exceptions import RayActorError

from verl_credit.errors import IntegrityError


class RolloutWatch:
    """Collects the errors of one phase (a step's rollouts, an evaluation) and stops early when they are too many."""

    def __init__(self, tolerated_share: float, *, every_s: float = 2.0) -> None:
        self.tolerated_share, self.every_s = tolerated_share, every_s
        self.drain: Callable[[], list[str]] | None = None
        self.errors: list[str] = []
        self.expected = 0
        self._last = float("-inf")

    def begin(self, expected: int) -> None:
        """A new phase of ``expected`` rollouts."""
        self.errors, self.expected = [], expected

    def look(self) -> None:
        """Called while waiting; asks the workers every ``every_s`` seconds."""
        now = time.monotonic()
        if self.drain is not None and now - self._last >= self.every_s:
            self._last = now
            self._collect()

    def settle(self, arrived: int) -> int:
        """All rollouts have ended: number of those that failed. Raises IntegrityError above the tolerated share."""
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
            result = wait(*args, **kwargs)
            self.look()
            return result

        def watched_sample(*args, **kwargs):
            # Where too few rollouts or none are left, verl raises or goes on with an empty batch.
            try:
                found = sample(*args, **kwargs)
            except (RuntimeError, ValueError):
                self._collect()  # the cause, if it was an error of a rollout
                raise
            if not found[0].keys:
                self._collect()
            return found

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
