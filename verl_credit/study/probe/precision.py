"""Keeps a float64 model in float64: transformers' norms and softmaxes round to float32 in between."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode

_CASTS = (torch.Tensor.to, torch.softmax, torch.Tensor.softmax, torch.nn.functional.softmax)


class KeepDouble(TorchFunctionMode):
    """While it is entered, a model that asks for float32 gets float64.

    Rounding of 1e-7 inside the forward hides a change of entropy of that size, and makes derivatives differ from finite
    differences.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.float:
            return args[0].double()
        if func in _CASTS:
            args = tuple(_double(value) for value in args)
            kwargs = {name: _double(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _double(value):
    return torch.float64 if value is torch.float32 else value
