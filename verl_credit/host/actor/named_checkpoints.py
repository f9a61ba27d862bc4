"""`keep_checkpoints`: checkpoints that verl must not delete.

verl deletes in one place: its checkpoint manager, on rank 0 of the actor, lists what it has saved, and beyond
``max_actor_ckpt_to_keep`` removes the oldest of the list. A named checkpoint leaves that list as soon as it is saved. A
process that resumes begins with an empty list, so that older checkpoints are safe there anyhow.
"""

from __future__ import annotations

from pathlib import Path

from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager


def managers_of(engine) -> list[BaseCheckpointManager]:
    """Raises RuntimeError for an engine without one: what it deletes is not known."""
    found = [value for value in vars(engine).values() if isinstance(value, BaseCheckpointManager)]
    if not found:
        raise RuntimeError(
            f"keep_checkpoints: {type(engine).__name__} has no checkpoint manager of verl's; expected an engine with one "
            "(fsdp, fsdp2, megatron), or keep_checkpoints=[]"
        )
    return found


def keep_checkpoint(engine, step: int) -> None:
    """The checkpoint of ``step`` is neither counted nor deleted from now on."""
    for manager in managers_of(engine):
        manager.previous_saved_paths = [
            path for path in manager.previous_saved_paths if Path(path).parent.name != f"global_step_{step}"
        ]
