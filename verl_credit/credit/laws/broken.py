"""A law that does not hold, and the comparisons that find it."""

import torch

# Tolerances are relative to the scale: the largest of the numbers compared.
CLOSE = {torch.float32: 1e-5, torch.float64: 1e-12}  # by what is returned: only the order of a sum may matter
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


def scale_of(values: torch.Tensor) -> float:
    """The largest size of a value; 1 where all are 0."""
    sizes = values.abs().nan_to_num()
    return (float(sizes.max()) if sizes.numel() else 0.0) or 1.0


def same(ours, expected, *, tolerance: float | None = None, what: str = "", runs: int = 2) -> None:
    """Equal up to ``tolerance`` (without it, that of what the operator returns) times the scale of ``expected``."""
    for name, a, b in zip(("advantage", "clip scale"), ours, expected, strict=False):
        limit = CLOSE[a.dtype] if tolerance is None else tolerance
        far = (a - b).abs() > limit * scale_of(b)
        far |= a.isnan() != b.isnan()
        if far.any():
            row, place = far.nonzero()[0].tolist()
            raise Broken(
                f"{what + ': ' if what else ''}{name} of row {row}, token {place}: "
                f"{float(a[row, place]):.9g}, expected {float(b[row, place]):.9g}",
                runs,
            )
