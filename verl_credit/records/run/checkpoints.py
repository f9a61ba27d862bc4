"""The numbers of checkpoints that a run writes and keeps: only arithmetic, so that `plan` needs no OmegaConf."""

from __future__ import annotations

from collections.abc import Collection


def count_written(steps: int, save_every: int, named: Collection[int]) -> int:
    """The number of checkpoints that a run of ``steps`` writes; with ``save_every`` below 1 only the named steps."""
    regular = {*range(save_every, steps, save_every), steps} if save_every > 0 else set()
    return len(regular | {step for step in named if step <= steps})


def count_kept(steps: int | None, save_every: int, most: int | None, named: Collection[int]) -> int | None:
    """The number of checkpoints at the end; None when all are kept and the number of steps is not known.

    ``most`` bounds the unnamed checkpoints (``trainer.max_actor_ckpt_to_keep``); None: no bound.
    """
    bounds = []
    if steps:
        bounds.append(count_written(steps, save_every, named))
    if most is not None or save_every < 1:
        bounds.append(len(named) + (most or 0 if save_every > 0 else 0))
    return min(bounds, default=None)
