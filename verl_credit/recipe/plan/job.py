"""The job that a plan is made for: verl's keys that decide memory and time, and further assumptions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from verl_credit.errors import ConfigError, unknown_key
from verl_credit.policy.log_probs import FLASH
from verl_credit.redact import redact_value


@dataclass(frozen=True)
class Job:
    """The keys of verl that decide memory and time. Token counts are per device, sizes in bytes per number."""

    nodes: int = 1
    per_node: int = 1
    # the batch
    prompts: int = 1
    rollouts: int = 1
    mini_batch: int = 1
    epochs: int = 1
    max_prompt: int = 0
    max_response: int = 0
    max_turns: int = 1
    # what a forward holds
    dynamic: bool = True
    """Micro-batches are counted in tokens (use_dynamic_bsz), not in rows."""
    update_tokens: int = 0
    log_prob_tokens: int = 0
    checkpointing: bool = True
    attention: str = "flash"
    """flash (flash-attn or FlexAttention) | sdpa (piece by piece, the output in two copies)."""
    log_prob_path: str = FLASH
    """Code of the log-probs (verl_credit/policy/log_probs.py): flash | ours | loop (verl's) | fused (verl's head)."""
    softmax_bytes: int = 4
    """Bytes per number of a (log-)softmax of the logits: CUDA's autocast makes it fp32, the CPU's leaves bf16 alone."""
    device_type: str = "cuda"
    entropy: str = "eager"
    """eager | compiled | chunked. Ours is always in chunks, without compiling, and does not read it."""
    entropy_chunk: int = 2048
    update_entropy: bool = False
    unit_temperature: bool = True
    branches: bool = False
    # the state
    weight_bytes: int = 4
    compute_bytes: int = 2
    reduce_bytes: int = 4
    reference_bytes: int = 4
    reference: bool = False
    lora_rank: int = 0
    shards: int = 1
    sequence_parallel: int = 1
    reshard: bool = True
    unsharded_gradients: bool = False
    offload_weights: bool = False
    offload_optimizer: bool = False
    stays_on_host: bool = False
    """FSDP2's offload_policy: weights, gradients and optimiser live and step on the host."""
    fused_step: bool = True
    """torch's multi-tensor AdamW (its default on CUDA) holds a further copy while it steps."""
    # rollouts
    engine: str = "vllm"
    engine_bytes: int = 2
    tensor_parallel: int = 1
    model_len: int = 0
    """rollout.max_model_len: tokens of the longest sequence that the engine takes; 0 (null): all positions of the model."""
    served_answers: bool = False
    """The engine scores answers after their rows."""
    utilization: float = 0.5
    sleeps: bool = True
    max_seqs: int = 256
    bucket_bytes: int = 0
    # the run
    steps: int | None = None
    passes: int = 1
    save_every: int = -1
    test_every: int = -1
    val_first: bool = True
    val_rows: int = 0
    """Held-out questions; 0 when not known."""
    val_modes: int = 1
    val_samples: int = 1
    search_timeout_s: float = 20.0
    keep: int | None = None
    named: tuple[int, ...] = ()
    """Steps whose checkpoints stay (`keep_checkpoints`)."""

    @property
    def devices(self) -> int:
        return self.nodes * self.per_node

    @property
    def rows(self) -> int:
        return self.prompts * self.rollouts

    @property
    def longest_row(self) -> int:
        return self.max_prompt + self.max_response

    @property
    def data_parallel(self) -> int:
        return self.devices // self.sequence_parallel


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
    """Core-seconds of the index per query. Default: by hardware.index (plan/search.py); 0 on a device or elsewhere."""
    encoder_core_seconds: float = 0
    """Core-seconds of the query's encoder. Default: by hardware.index.dim, where search_core_seconds has one."""
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
    """Memory that a sleeping vLLM still holds."""
    host_gib: float = 0
    """Interpreters, Ray, TransferQueue, data of one node. Default: 3.5 on a CPU, else 8 + 3 per device."""
    train_rows: int = 0
    """Rows of the training data, for the number of steps when trainer.total_training_steps is not set."""


def assumptions(
    given: Mapping | None,
    job: Job,
    *,
    device: str,
    mfu: float,
    cores: float = 1,
    search: float = 0.0,
    encoder: float = 0.0,
) -> Assumptions:
    """``plan.*`` of a recipe over the defaults. Raises `ConfigError` for unknown or negative values."""
    given = {key: value for key, value in dict(given or {}).items() if key != "model"}
    known = {field.name for field in fields(Assumptions)}
    for key, value in given.items():
        if key not in known:
            raise unknown_key("plan", key, ["model", *sorted(known)], redact_value(key, value))
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            raise ConfigError(
                key=f"plan.{key}", value=value, accepted="expected a number, 0 or more", shown=repr(value)
            )
    response = given.get("mean_response_tokens") or job.max_response / 2
    on_cpu = device == "cpu"
    defaults = {
        "mean_prompt_tokens": job.max_prompt / 4,
        "mean_response_tokens": response,
        "mean_generated_tokens": response * (0.35 if job.max_turns > 1 else 1.0),
        "mean_turns": max(1.0, job.max_turns / 2),
        "mfu": mfu,
        "host_cores": cores,
        "search_core_seconds": search,
        "encoder_core_seconds": encoder,
        "host_gib": 3.5 if on_cpu else 8 + 3 * job.per_node,
    }
    if on_cpu:
        defaults |= {"context_gib": 0.0, "fragmentation": 0.0, "step_overhead_seconds": 2.0}
    result = replace(Assumptions(), **defaults, **{k: v for k, v in given.items() if k not in defaults})
    result = replace(result, **{k: v for k, v in given.items() if k in defaults})
    for key in ("mfu", "host_cores", "disk_gb_s", "decode_efficiency"):
        if not getattr(result, key):
            raise ConfigError(key=f"plan.{key}", value=0, accepted="expected a number above 0")
    return result
