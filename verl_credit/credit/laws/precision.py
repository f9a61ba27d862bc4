"""The precision in which a user's function computed, which its result in float64 no longer tells."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch


def noted(function: Callable) -> tuple[Callable, set[torch.dtype]]:
    """The function, and the set to which each call adds the dtypes of the floating point tensors that it returns."""
    dtypes: set[torch.dtype] = set()

    @wraps(function)
    def noting(*given, **options):
        outputs = function(*given, **options)
        several = outputs if isinstance(outputs, tuple | list) else ()
        dtypes.update(
            out.dtype for out in several if isinstance(out, torch.Tensor) and out.is_floating_point()
        )
        return outputs

    return noting, dtypes
