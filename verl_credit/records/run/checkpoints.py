"""How many checkpoints a run writes and keeps: every ``save_freq`` steps, at its last step, and those that it names."""

from __future__ import annotations

from collections.abc import Collection


def written(steps: int, save_every: int, named: Collection[int]) -> int:
    """Of a run of ``steps``; ``save_every`` below 1: the named ones alone."""
    regular = {*range(save_every, steps, save_every), steps} if save_every > 0 else set()
    return len(regular | {step for step in named if step <= steps})


def kept(steps: int | None, save_every: int, most: int | None, named: Collection[int]) -> int | None:
    """In the end. ``most``: of those that have no name (``trainer.max_actor_ckpt_to_keep``), None: all. None where every one
    is kept and the number of steps is not known."""
    bounds = []
    if steps:
        bounds.append(written(steps, save_every, named))
    if most is not None or save_every < 1:
        bounds.append(len(named) + (most or 0 if save_every > 0 else 0))
    return min(bounds, default=None)
