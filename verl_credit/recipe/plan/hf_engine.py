"""Memory of the rollout engine `hf` on a GPU, and the rows that it generates at a time; for the engine and the plan.

    gpu_memory_utilization x memory = weights + one forward of prompts + rows x (a row's cache + its logits)

The engine takes the memory batch by batch, and only what a batch needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_credit.recipe.plan.activations import forward_only
from verl_credit.recipe.plan.job import Job
from verl_credit.recipe.plan.model_shape import ModelShape

GIB = 2**30
PREFILL_TOKENS = 2**14
"""Tokens of prompts in one forward."""
LOGIT_BYTES = 60
"""Bytes per logit of a row while a token is drawn; with top-k or top-p, which sort them, the most."""
SHARE = "actor_rollout_ref.rollout.gpu_memory_utilization"


@dataclass(frozen=True)
class HFEngine:
    """Bytes of the engine with rows of at most ``row_tokens`` tokens, numbers of ``bytes_per_number`` bytes."""

    shape: ModelShape
    bytes_per_number: int
    row_tokens: int

    @property
    def weights(self) -> float:
        return self.shape.parameters * self.bytes_per_number

    @property
    def forward(self) -> float:
        """Activations of `PREFILL_TOKENS` tokens, and their masks: boolean, and as numbers for the attention."""
        c = self.bytes_per_number
        passing = forward_only(self.shape, Job(compute_bytes=c), tokens=PREFILL_TOKENS)
        return passing + PREFILL_TOKENS * self.row_tokens * (2 + c)

    @property
    def row(self) -> float:
        """The cache of a row, one layer of it once more at the width of all heads, and the logits."""
        c = self.bytes_per_number
        cache = self.shape.kv_bytes_per_token(c) + 2 * self.shape.q_width * c
        return self.row_tokens * cache + self.shape.vocabulary * LOGIT_BYTES

    def used(self, rows: float) -> float:
        return self.weights + self.forward + rows * self.row

    def rows(self, memory: float, share: float) -> int:
        """Rows at a time that the share of a device's memory holds."""
        return max(0, int((memory * share - self.used(0)) // self.row))

    def too_small(self, memory: float, share: float) -> str | None:
        """Why not even one row fits, with what would be enough; None where one does."""
        if self.rows(memory, share):
            return None
        least = self.used(1) / memory
        enough = f"at least {least + 0.005:.2f}" if least < 1 else "more than the device has"
        return (
            f"{SHARE}={share:g} of {memory / GIB:.1f} GiB: the engine hf takes {self.weights / GIB:.1f} GiB of weights, "
            f"{self.forward / GIB:.1f} GiB for a forward of prompts and {self.row / GIB:.2f} GiB for one row of "
            f"{self.row_tokens} tokens, hence {enough}"
        )
