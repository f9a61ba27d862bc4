"""The default torch.distributed group of a CPU worker."""

import os
from collections.abc import Mapping

import torch.distributed

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def describes_a_rank(environ: Mapping[str, str]) -> bool:
    """Whether the environment sets this process's rank and group."""
    return all(environ.get(name) for name in _RANK_VARIABLES)


def init_gloo_group() -> None:
    """Join the default group over gloo, unless this process has one or has no rank.

    verl requests the back ends "cpu:gloo,<device>:<backend>". On a CPU that names the device "cpu" twice, which torch
    refuses. verl keeps an existing default group, so ours is made first.
    """
    if torch.distributed.is_initialized() or not describes_a_rank(os.environ):
        return
    torch.distributed.init_process_group(
        backend="cpu:gloo",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        init_method=os.environ.get("DIST_INIT_METHOD"),
    )
