"""The clip range of a turn, by how its gain compares with the gains of the same turn."""

import torch


def adaptive_clip_scale(z: torch.Tensor, beta: float) -> torch.Tensor:
    """c = 1 + beta (2 sigmoid(z) - 1), in (1 - beta, 1 + beta): a wider range for a turn that gained more."""
    return 1 + beta * (2 * z.sigmoid() - 1)
