"""A law that does not hold, and the comparisons that find it."""

from __future__ import annotations

CLOSE = 1e-9  # float64 in and out, so only the order of a sum may make a difference
ABOUT = 1e-4  # allows for variance floors and epsilons


class Broken(AssertionError):
    """A law does not hold; the message says where. ``runs``: how many of the operator's last calls show it."""

    def __init__(self, message: str, runs: int = 1) -> None:
        super().__init__(message)
        self.runs = runs


def finite(outputs, what: str = "a value that is not finite went in, and") -> None:
    for out in outputs:
        if not out.isfinite().all():
            raise Broken(f"{what}: row {int((~out.isfinite()).nonzero()[0, 0])} of the result is not finite")


def same(ours, expected, *, tolerance: float = CLOSE, what: str = "", runs: int = 2) -> None:
    """Equal up to ``tolerance``, of the expected value where that is above 1."""
    for name, a, b in zip(("advantage", "clip scale"), ours, expected, strict=False):
        far = (a - b).abs() > tolerance * (1 + b.abs())
        far |= a.isnan() != b.isnan()
        if far.any():
            row, place = far.nonzero()[0].tolist()
            raise Broken(
                f"{what + ': ' if what else ''}{name} of row {row}, token {place}: "
                f"{float(a[row, place]):.9g}, expected {float(b[row, place]):.9g}",
                runs,
            )
