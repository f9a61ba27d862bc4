"""The job that a plan is made for: verl's keys that decide memory and time, and further assumptions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace

from verl_credit.config.engines import engine_named
from verl_credit.config.keys import Algorithm
from verl_credit.config.log_prob_path import FLASH, log_prob_path
from verl_credit.config.settings import INFO_GAIN
from verl_credit.errors import ConfigError
from verl_credit.names import ENV_AGENT

BYTES = {
    "fp32": 4, "float32": 4, "float": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2, "half": 2, "auto": 2,
}  # fmt: skip
_A, _R, _M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_FSDP = f"{_A}.fsdp_config"


def _key(default, key: str):
    """A field that has the value of ``key``."""
    return field(default=default, metadata={"key": key})


@dataclass(frozen=True)
class Job:
    """The keys of verl that decide memory and time. Token counts are per device, sizes in bytes per number."""

    nodes: int = _key(1, "trainer.nnodes")
    per_node: int = _key(1, "trainer.n_gpus_per_node")
    # the batch
    prompts: int = _key(1, "data.train_batch_size")
    rollouts: int = _key(1, f"{_R}.n")
    mini_batch: int = _key(1, f"{_A}.ppo_mini_batch_size")
    epochs: int = _key(1, f"{_A}.ppo_epochs")
    max_prompt: int = _key(512, "data.max_prompt_length")
    max_response: int = _key(512, "data.max_response_length")
    max_turns: int = 1
    searches: bool = False
    """Turns search; those in an environment do not."""
    # what a forward holds
    update_tokens: int = 0
    log_prob_tokens: int = 0
    checkpointing: bool = _key(True, f"{_M}.enable_gradient_checkpointing")
    attention: str = "flash"
    """flash (flash-attn or FlexAttention) | sdpa (piece by piece, the output in two copies)."""
    log_prob_path: str = FLASH
    """Code of the log-probs (verl_credit/config/log_prob_path.py): flash | ours | loop (verl's) | fused (verl's head)."""
    device_type: str = "cuda"
    entropy: str = "eager"
    """eager | compiled | chunked. Ours is always in chunks, without compiling, and does not read it."""
    entropy_chunk: int = _key(2048, f"{_A}.entropy_from_logits_chunk_size")
    update_entropy: bool = False
    unit_temperature: bool = True
    branches: bool = False
    probes: int = _key(0, "probe.every")
    # the state
    weight_bytes: int = _key(4, f"{_FSDP}.model_dtype")
    compute_bytes: int = _key(2, f"{_FSDP}.mixed_precision.param_dtype")
    reduce_bytes: int = _key(4, f"{_FSDP}.mixed_precision.reduce_dtype")
    reference_bytes: int = _key(2, "actor_rollout_ref.ref.fsdp_config.model_dtype")
    reference: bool = False
    lora_rank: int = 0
    shards: int = 1
    fsdp: bool = True
    """False: a plain process, whose forward works on the weights themselves (evidence/plan/measure_lab.py)."""
    sequence_parallel: int = _key(1, f"{_A}.ulysses_sequence_parallel_size")
    reshard: bool = _key(True, f"{_FSDP}.reshard_after_forward")
    unsharded_gradients: bool = _key(False, f"{_FSDP}.use_no_sync_for_gradient_accumulation")
    offload_weights: bool = _key(False, f"{_FSDP}.param_offload")
    offload_optimizer: bool = _key(False, f"{_FSDP}.optimizer_offload")
    stays_on_host: bool = _key(False, f"{_FSDP}.offload_policy")
    """FSDP2's offload_policy: weights, gradients and optimiser live and step on the host."""
    # rollouts
    engine: str = "vllm"
    engine_bytes: int = _key(2, f"{_R}.dtype")
    tensor_parallel: int = _key(1, f"{_R}.tensor_model_parallel_size")
    model_len: int = _key(0, f"{_R}.max_model_len")
    """rollout.max_model_len: tokens of the longest sequence that the engine takes; 0 (null): all positions of the model."""
    utilization: float = _key(0.5, f"{_R}.gpu_memory_utilization")
    sleeps: bool = _key(True, f"{_R}.free_cache_engine")
    max_seqs: int = _key(256, f"{_R}.max_num_seqs")
    graphs: int = 0
    """CUDA graphs that the engine captures, one per number of rows; 0 with enforce_eager."""
    bucket_bytes: int = 0
    # the run
    steps: int | None = _key(None, "trainer.total_training_steps")
    passes: int = _key(1, "trainer.total_epochs")
    save_every: int = _key(-1, "trainer.save_freq")
    test_every: int = _key(-1, "trainer.test_freq")
    val_first: bool = _key(True, "trainer.val_before_train")
    val_rows: int = 0
    """Held-out questions; 0 when not known."""
    val_modes: tuple[str, ...] = ("greedy",)
    val_samples: int = _key(1, f"{_R}.val_kwargs.n")
    search_timeout_s: float = _key(20.0, "search.timeout_s")
    keep: int | None = _key(None, "trainer.max_actor_ckpt_to_keep")
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
    def softmax_bytes(self) -> int:
        """Bytes per number of a (log-)softmax of the logits: CUDA's autocast makes it fp32, the CPU's leaves bf16 alone."""
        return self.compute_bytes if self.device_type == "cpu" else 4

    @property
    def data_parallel(self) -> int:
        return self.devices // self.sequence_parallel


def read_job(config: Mapping, *, flash_attn: bool) -> Job:
    """Reads a composed configuration (OmegaConf, or plain dictionaries). Raises `ConfigError`."""
    # Here, because the formulas that take a Job need torch alone.
    from verl_credit.turns.score.scorers import SCORERS

    get = _Reader(config)
    keyed = [entry for entry in fields(Job) if entry.metadata]
    job = Job(**{entry.name: get(entry.metadata["key"], entry.default) for entry in keyed})
    devices, parallel = job.devices, job.sequence_parallel
    if devices % parallel:
        raise ConfigError(f"{_A}.ulysses_sequence_parallel_size={parallel} does not divide {devices} devices")
    fsdp_size = get(f"{_FSDP}.fsdp_size", -1)
    searches = get("search.max_searches", 0) if get(f"{_R}.multi_turn.enable", False) else 0
    in_environment = get(f"{_R}.agent.default_agent_loop", None) == ENV_AGENT
    turns = get("environment.max_steps", 1) if in_environment else searches + 1
    # A row is a turn then, and a rollout has half of the most turns, as in `mean_turns`.
    if in_environment and get("environment.window", None) is not None:
        job, turns = replace(job, rollouts=job.rollouts * max(1, turns // 2)), 1
    attention = get(f"{_M}.override_config.attn_implementation", "flash_attention_2")
    on_cpu = get("trainer.device", "cuda") == "cpu"
    sdpa = on_cpu or attention in ("credit_sdpa", "sdpa") or (attention == "auto" and not flash_attn)
    compiled = "compiled" if get(f"{_FSDP}.use_torch_compile", True) else "eager"
    rides = SCORERS[get("algorithm.info_gain_scorer", "branch")].rides
    given = {
        name: get(f"algorithm.{name}", None) for name in ("turn_signal", "turn_signals", "algorithm_mode")
    }
    mode = get("algorithm.info_gain_norm_mode", "none")
    credit = Algorithm.model_construct(
        info_gain_norm_mode=mode, **{k: v for k, v in given.items() if v is not None}
    )
    gains = searches > 0 and INFO_GAIN in credit.signal_weights
    engine = engine_named(get(f"{_R}.name", "vllm"))
    captures = not (on_cpu or engine.ours or get(f"{_R}.enforce_eager", False))
    job = replace(
        job,
        max_turns=turns,
        searches=searches > 0,
        attention="sdpa" if sdpa else "flash",
        log_prob_path=log_prob_path(
            flash=flash_attn and not on_cpu,
            fused=get(f"{_M}.use_fused_kernels", False),
            distills=get("distillation.enabled", False),
        ),
        device_type="cpu" if on_cpu else "cuda",
        entropy="chunked" if get(f"{_FSDP}.entropy_from_logits_with_chunking", False) else compiled,
        update_entropy=get(f"{_A}.calculate_entropy", False) or get(f"{_A}.entropy_coeff", 0) != 0,
        unit_temperature=get(f"{_R}.temperature", 1.0) == 1.0,
        branches=gains and rides,
        reference=get(f"{_A}.use_kl_loss", False) or get("algorithm.use_kl_in_reward", False),
        lora_rank=get(f"{_M}.lora_rank", 0) or get(f"{_M}.lora.rank", 0),
        shards=devices if fsdp_size <= 0 or fsdp_size >= devices else fsdp_size,
        engine=engine.name,
        graphs=_graphs(get, job.max_seqs) if captures else 0,
        bucket_bytes=get(f"{_R}.checkpoint_engine.update_weights_bucket_megabytes", 2048) * 2**20,
        val_rows=max(0, get("data.val_max_samples", -1)),
        val_modes=tuple(get("evaluation.modes", ["greedy"])),
        named=tuple(get("keep_checkpoints", ())),
    )
    if engine.splits and devices % job.tensor_parallel:
        key = f"{_R}.tensor_model_parallel_size"
        raise ConfigError(f"{key}={job.tensor_parallel} does not divide {devices} devices", key=key)
    update = _tokens(get, f"{_A}.use_dynamic_bsz", f"{_A}.ppo", job, job.mini_batch * job.rollouts)
    log_prob = _tokens(get, f"{_R}.log_prob_use_dynamic_bsz", f"{_R}.log_prob", job, job.rows)
    return replace(job, update_tokens=update, log_prob_tokens=log_prob)


def _graphs(get: _Reader, most: int) -> int:
    """vLLM captures 1, 2, 4, then every 8th number up to 256, then every 16th up to twice max_num_seqs, at most 512."""
    if (given := get(f"{_R}.cudagraph_capture_sizes", None)) is not None:
        return len(given)
    most = min(2 * most, 512)
    return sum(size <= most for size in (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)))


def _tokens(get: _Reader, switch: str, prefix: str, job: Job, all_rows: int) -> int:
    """Tokens of one micro-batch on one device: the budget, or rows x the longest row, never more than the batch."""
    rows = max(1, -(-all_rows // job.data_parallel))
    if get(switch, False):
        return min(get(f"{prefix}_max_token_len_per_gpu", 16384), rows * job.longest_row)
    micro = get(key := f"{prefix}_micro_batch_size_per_gpu", 0)
    if not micro:
        raise ConfigError(key=key, accepted=f"set it, or {switch}=true")
    return min(micro, rows) * job.longest_row // job.sequence_parallel


def require_number(key: str, value, accepted: str, fits: Callable[[float], bool]) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not fits(value):
        raise ConfigError(key=key, value=value, accepted=f"expected {accepted}", shown=repr(value))


@dataclass(frozen=True)
class _Reader:
    """Dotted look-up; a key that is absent or null gives the default, whose type the value has to have.

    A dtype is read as bytes per number; a number whose default is above 0 has to be above 0, too.
    """

    config: Mapping

    def __call__(self, key: str, default):
        node = self.config
        for part in key.split("."):
            if node is None or part not in node:
                return default
            node = node[part]
        if node is None:
            return default
        if key.endswith("dtype"):
            if str(node) not in BYTES:
                raise ConfigError(key=key, value=node, accepted=BYTES, shown=repr(node))
            return BYTES[str(node)]
        if isinstance(default, bool):
            return bool(node)
        if isinstance(default, (int, float)):
            accepted = "a number above 0" if default > 0 else "a number"
            require_number(key, node, accepted, lambda v: default <= 0 or v > 0)
        return node
