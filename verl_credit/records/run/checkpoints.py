"""How many checkpoints a run writes and keeps: arithmetic alone, which `plan` needs on a machine without OmegaConf."""

from __future__ import annotations

from collections.abc import Collection


def count_written(steps: int, save_every: int, named: Collection[int]) -> int:
    """The number of checkpoints that a run of ``steps`` writes; with ``save_every`` below 1 the named ones alone."""
    regular = {*range(save_every, steps, save_every), steps} if save_every > 0 else set()
    return len(regular | {step for step in named if step <= steps})


def count_kept(steps: int | None, save_every: int, most: int | None, named: Collection[int]) -> int | None:
    """The number that is left in the end; None where every one is kept and the number of steps is not known.

    ``most`` bounds those without a name (``trainer.max_actor_ckpt_to_keep``); None: it does not.
    """
    bounds = []
    if steps:
        bounds.append(count_written(steps, save_every, named))
    if most is not None or save_every < 1:
        bounds.append(len(named) + (most or 0 if save_every > 0 else 0))
    return min(bounds, default=None)
