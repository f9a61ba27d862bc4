"""An extension of vLLM's worker that fails at every bucket of weights."""

from verl_credit.host.vllm_rollout.worker_extension import WorkerExtension


class FailingExtension(WorkerExtension):
    def _update_weights(self, *args, **kwargs):
        raise ValueError("this extension takes no weights")
