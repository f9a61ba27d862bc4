"""What learning runs of all exact worlds share: equal rollouts, updates and steps, and the curve of the exact success."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from verl_credit.study.exact_worlds.fed_credit import Rolled

ROLLOUTS, UPDATES = 128, 4
"""Those of a step. A group of n rollouts leaves 128 / n questions."""
Credit = Callable[[Rolled], torch.Tensor]
"""It gives every turn of a step's trajectories an advantage, [B, K1]."""


class Learning(Protocol):
    """R runs side by side, which begin alike for every credit."""

    def step(self, credit: Credit) -> None: ...

    def success(self) -> torch.Tensor:
        """The exact success, [R]."""
        ...


def curve(learning: Learning, credit: Credit, steps: int) -> torch.Tensor:
    """The exact success after each step, [steps, R]."""
    success = []
    for _ in range(steps):
        learning.step(credit)
        success.append(learning.success())
    return torch.stack(success)
