"""Two gradients beside each other."""

from __future__ import annotations

import torch

NOTHING = 1e-12  # a shorter gradient is rounding, and has no direction


def cosine(a_D: torch.Tensor, b_D: torch.Tensor) -> float | None:
    """None where one of them has no direction: undefined, not 0."""
    lengths = float(a_D.norm()), float(b_D.norm())
    if min(lengths) < NOTHING:
        return None
    return float(a_D @ b_D) / (lengths[0] * lengths[1])


def length_ratio(a_D: torch.Tensor, b_D: torch.Tensor) -> float | None:
    """|a| / |b|; None where b has no length."""
    return float(a_D.norm() / b_D.norm()) if float(b_D.norm()) >= NOTHING else None


def compare(expected_D: torch.Tensor, true_D: torch.Tensor) -> dict[str, float | None]:
    """How an expected gradient differs from the true one.

        norm_ratio = |E[g]| / |grad J|        difference = min over c of |E[g]/c - grad J| = |grad J| sin(angle)

    scale is that c, |E[g]|^2 / (E[g] . grad J). Cosine, scale and difference are None where E[g] is 0 or (scale and
    difference) at a right angle to grad J; all four are None where grad J is 0.
    """
    angle, ratio = cosine(expected_D, true_D), length_ratio(expected_D, true_D)
    along = float(expected_D @ true_D)
    scale = float(expected_D @ expected_D) / along if angle is not None and abs(angle) > NOTHING else None
    difference = None if scale is None else float((expected_D / scale - true_D).norm())
    return {"cosine": angle, "norm_ratio": ratio, "scale": scale, "difference": difference}


def share_beyond(expected_D: torch.Tensor, basis_D_J: torch.Tensor) -> float | None:
    """|rest| / |E[g]|, the rest being what no sum of the basis' gradients, however weighed, gives; None where E[g] is 0."""
    length = float(expected_D.norm())
    if length < NOTHING:
        return None
    found_J_1 = torch.linalg.lstsq(basis_D_J, expected_D[:, None], driver="gelsd").solution
    return float((expected_D - (basis_D_J @ found_J_1).squeeze(1)).norm()) / length
