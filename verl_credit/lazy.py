"""torch, imported at its first use: a command that composes a recipe reads the operators' declarations and needs no tensor.

A file writes ``from verl_credit.lazy import torch`` and uses it as the module. Annotations are not evaluated there
(``from __future__ import annotations``), and no value of torch is read while the file is imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
else:

    class Torch:
        def __getattr__(self, name: str) -> Any:
            value = getattr(import_module("torch"), name)
            setattr(self, name, value)
            return value

    torch = Torch()
