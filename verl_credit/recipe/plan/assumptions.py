"""What a plan assumes beside the configuration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Assumptions:
    """Numbers that no configuration has. Each can be set as ``plan.NAME`` and is listed in the report."""

    mean_prompt_tokens: float = 0
    """Default: a quarter of data.max_prompt_length."""
    mean_response_tokens: float = 0
    """Default: half of data.max_response_length. Tool results are part of the response."""
    mean_generated_tokens: float = 0
    """Default: the whole response, or 0.35 of it when there are tool calls."""
    mean_turns: float = 0
    """Default: half of the turns that are allowed, at least one."""
    branch_tokens: float = 16
    """Tokens of one scored answer, header and aliases included."""
    branch_kernel_share: float = 0
    """Share of a log-prob forward's time that answers add beside their FLOPs. Default: 0.06, with SDPA 0.12, on a CPU 0.
    8 answers of a row of 4,096 tokens took 6 % with FlexAttention, 7 with flash-attn, 13 with SDPA (H100, evidence/gpu)."""
    gain_driver_ms: float = 0.15
    """Milliseconds per context in which the trainer's process alone reads rows, plans answers and deals out log-probs:
    0.5 s for 3,615 contexts of 1,024 rows, on one core (evidence/information_gain)."""
    gain_store_gb_s: float = 0.4
    """Speed of TransferQueue's one storage unit, through which gains move 16 bytes per token of a row. Not measured."""
    mfu: float = 0
    """Share of the peak in training. Default: the hardware row's."""
    decode_efficiency: float = 0.5
    """Share of the memory bandwidth that decoding reaches."""
    decode_overhead_ms: float = 5.0
    """Milliseconds of scheduling, sampling and detokenising in a decoding step."""
    longest_over_mean: float = 2.0
    """A batch waits for its longest row."""
    search_seconds: float = 0.5
    """Seconds of waiting in a tool call, beside its computation; rows wait at the same time."""
    search_core_seconds: float = 0
    """Core-seconds of a query, encoder and index. 0: not counted, as for an index on a device or elsewhere."""
    host_cores: float = 0
    """Cores of the node that has the index. Default: the hardware row's."""
    val_rows: int = 0
    """Held-out questions, where data.val_max_samples does not say."""
    disk_gb_s: float = 1.0
    """Speed at which checkpoints are written."""
    step_overhead_seconds: float = 10.0
    """Seconds of weight sync, waking the engine, data and metrics in a training step."""
    context_gib: float = 0.8
    """CUDA context, NCCL and cuBLAS workspaces of one process; 0 on a CPU."""
    fragmentation: float = 0.05
    """Memory that the caching allocator holds beyond the tensors, as a share of them; 0 on a CPU."""
    engine_activation_gib: float = 2.0
    """vLLM's own activations and CUDA graphs, inside its share."""
    engine_asleep_gib: float = 1.0
    """Memory that a sleeping vLLM still holds, without its CUDA graphs."""
    cuda_graph_mib: float = 40.0
    """One captured CUDA graph of the engine, which sleep does not free (verl's rollout.yaml says so). Not measured."""
    host_gib: float = 0
    """Interpreters, Ray, TransferQueue, data of one node. Default: 3.5 on a CPU, else 8 + 3 per device."""
    train_rows: int = 0
    """Rows of the training data, for the number of steps when trainer.total_training_steps is not set."""

    @property
    def row_tokens(self) -> float:
        return self.mean_prompt_tokens + self.mean_response_tokens

    @property
    def generated_tokens(self) -> float:
        return min(self.mean_generated_tokens, self.mean_response_tokens)
