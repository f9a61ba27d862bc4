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

    A second name of a tied tensor is left out. vLLM 0.29 and later skip it themselves, but they refuse a bucket in which the
    first name is not there too, and verl sends a model in several buckets.
    """

    def __new__(cls, **kwargs):
        if current_platform.is_cpu():
            keep_plain_weights(_custom_ops)
        return super().__new__(cls, **kwargs)

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        """Receives and loads all buckets. Raises RuntimeError with all errors' words, or for a tied tensor of which
        only the second name arrived.

        vLLM hands on the words of the last exception alone. After a failure that is often one of verl's clean-up, "cannot
        close exported pointers exist".
        """
        self._tied_arrived, self._tied_left_out = set(), {}
        try:
            super().update_weights_from_ipc(*args, **kwargs)
        except Exception as error:
            raise RuntimeError(words_of(error)) from error
        for alias, canonical in self._tied_left_out.items():
            if canonical not in self._tied_arrived:
                raise RuntimeError(
                    f"{alias} arrived without {canonical}, to which the model ties it: the tensor was not updated"
                )

    def _update_weights(self, weights: list[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> None:
        model = self.model_runner.model
        if aliases := tied_names(model):
            weights = [
                (name, tensor)
                for name, tensor in weights
                if not self._left_out(own_name(model, name), aliases)
            ]
        super()._update_weights(weights, *args, **kwargs)

    def _left_out(self, name: str, aliases: dict[str, str]) -> bool:
        if name in aliases:
            self._tied_left_out[name] = aliases[name]
            return True
        self._tied_arrived.add(name)
        return False


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
    """Switches off vLLM's oneDNN matrix product before a model is loaded.

    oneDNN packs a layer's weight into its own form and empties `layer.weight`. The next weights from verl then cannot be
    copied. Raises RuntimeError when vLLM lacks the switch.
    """
    if not hasattr(custom_ops, SWITCH):
        raise RuntimeError(
            f"this vLLM has no vllm._custom_ops.{SWITCH}, so weights cannot be sent to it on a CPU; use a version of "
            ".ci/constraints-oldest.txt or -newest.txt"
        )
    setattr(custom_ops, SWITCH, False)
