"""Our extension of vLLM's worker process (`rollout.engine_kwargs.vllm.worker_extension_cls`), where weights are loaded.

Only vLLM's worker imports it.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm import _custom_ops
from vllm.platforms import current_platform

SWITCH = "_supports_onednn"


class WorkerExtension(vLLMColocateWorkerExtension):
    """verl's extension; vLLM's worker class inherits from it, so `__new__` runs before any model is loaded.

    A second name of a tied tensor is left out: vLLM refuses it since 0.29 in a bucket without the first name, and verl sends
    a model in several buckets.
    """

    def __new__(cls, **kwargs):
        if current_platform.is_cpu():
            keep_plain_weights(_custom_ops)
        return super().__new__(cls, **kwargs)

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        """Receives and loads all buckets. Raises RuntimeError for a tied tensor of which only the second name arrived, and
        with all errors' words: vLLM hands on those of the last alone, which after a failure is often one of verl's clean-up.
        """
        self._tied_arrived, self._tied_left_out = set(), {}
        try:
            super().update_weights_from_ipc(*args, **kwargs)
        except Exception as error:
            raise RuntimeError(words_of(error)) from error
        for alias, canonical in self._tied_left_out.items():
            if canonical not in self._tied_arrived:
                why = f"arrived without {canonical}, to which the model ties it: the tensor was not updated"
                raise RuntimeError(f"{alias} {why}")

    def _update_weights(self, weights: list[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> None:
        model, kept = self.model_runner.model, []
        aliases = tied_names(model)
        for name, tensor in weights:
            own = own_name(model, name) if aliases else name
            if own in aliases:
                self._tied_left_out[own] = aliases[own]
            else:
                self._tied_arrived.add(own)
                kept.append((name, tensor))
        super()._update_weights(kept, *args, **kwargs)


WRAPPED = ".base_layer."
"""vLLM's modules with LoRA have it in the names of their parameters, and verl's weights may or may not."""


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """Maps the second name of every tied parameter to its first one."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for full, parameter in model.named_parameters(remove_duplicate=False):
        name = full.replace(WRAPPED, ".")
        if (canonical := first.setdefault(id(parameter), name)) != name:
            aliases[name] = canonical
    return aliases


def own_name(model: torch.nn.Module, name: str) -> str:
    """The name that vLLM's model gives to a checkpoint's ``name``."""
    name = name.replace(WRAPPED, ".")
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    mapped = mapper.apply_list([name]) if mapper is not None else []
    return mapped[0] if mapped else name


def words_of(error: BaseException) -> str:
    """The words of an exception, after those of the exceptions during whose handling it was raised."""
    chain: list[str] = []
    while error is not None:
        chain.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "; then ".join(reversed(chain))


def keep_plain_weights(custom_ops: ModuleType) -> None:
    """Switches off vLLM's oneDNN matrix product before a model is loaded: it empties `layer.weight`, and the next weights
    from verl could not be copied. Raises RuntimeError when vLLM lacks the switch."""
    if not hasattr(custom_ops, SWITCH):
        lacks = f"this vLLM has no vllm._custom_ops.{SWITCH}, so weights cannot be sent to it on a CPU"
        raise RuntimeError(f"{lacks}; use a version of .ci/constraints-oldest.txt or -newest.txt")
    setattr(custom_ops, SWITCH, False)
