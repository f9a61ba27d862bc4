"""Muon: momentum whose direction is orthogonalised, for the matrices of the policy's layers."""

from __future__ import annotations

from collections.abc import Iterable

import torch

# Quintic Newton-Schulz coefficients: they push every singular value towards 1, fast rather than exactly.
_A, _B, _C = 3.4445, -4.7750, 2.0315


class Muon(torch.optim.Optimizer):
    """W <- W (1 - lr wd) - lr sqrt(max(1, rows / columns)) NS(g + momentum * m),  m <- momentum * m + g.

    NS(.) is five Newton-Schulz steps towards the nearest (semi-)orthogonal matrix. Only for 2-D parameters;
    another shape raises ValueError. Source: K. Jordan et al., "Muon: an optimizer for hidden layers" (2024).
    """

    def __init__(self, params: Iterable, lr: float = 0.02, momentum: float = 0.95, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim != 2:
                    raise ValueError(f"Muon takes matrices, got a parameter of shape {tuple(p.shape)}")

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                m = state.setdefault("momentum", torch.zeros_like(p))
                m.mul_(group["momentum"]).add_(p.grad)
                update = orthogonalize(p.grad + group["momentum"] * m)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


def orthogonalize(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """A matrix with (roughly) the singular vectors of ``matrix`` and all singular values near 1."""
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = wide / (wide.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x
