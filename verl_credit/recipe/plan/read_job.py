"""A job, read from a composed configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from verl_credit.errors import ConfigError
from verl_credit.policy.log_probs import log_prob_path
from verl_credit.recipe.plan.job import Job
from verl_credit.turns.scorers import SCORERS

BYTES = {
    "fp32": 4, "float32": 4, "float": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2, "half": 2, "auto": 2,
}  # fmt: skip
_A, _R, _M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"


def read_job(config: Mapping, *, flash_attn: bool) -> Job:
    """Reads a composed configuration (OmegaConf, or plain dictionaries). Raises `ConfigError`."""
    get = _Reader(config)
    nodes, per_node = get.count("trainer.nnodes", 1), get.count("trainer.n_gpus_per_node", 1)
    devices = nodes * per_node
    parallel = get.count(f"{_A}.ulysses_sequence_parallel_size", 1)
    if devices % parallel:
        raise ConfigError(f"{_A}.ulysses_sequence_parallel_size={parallel} does not divide {devices} devices")
    fsdp_size = get.whole(f"{_A}.fsdp_config.fsdp_size", -1)
    prompt, response = get.count("data.max_prompt_length", 512), get.count("data.max_response_length", 512)
    searches = get.whole("search.max_searches", 0) if get(f"{_R}.multi_turn.enable", False) else 0
    attention = str(get(f"{_M}.override_config.attn_implementation", "flash_attention_2"))
    on_cpu = get("trainer.device", "cuda") == "cpu"
    scorer = SCORERS[get("algorithm.info_gain_scorer", "branch")]
    gains = get("algorithm.info_gain_norm_mode", "none") != "none" and searches > 0
    job = Job(
        nodes=nodes,
        per_node=per_node,
        prompts=get.count("data.train_batch_size", 1),
        rollouts=get.count(f"{_R}.n", 1),
        mini_batch=get.count(f"{_A}.ppo_mini_batch_size", 1),
        epochs=get.count(f"{_A}.ppo_epochs", 1),
        max_prompt=prompt,
        max_response=response,
        max_turns=searches + 1,
        dynamic=bool(get(f"{_A}.use_dynamic_bsz", False)),
        checkpointing=bool(get(f"{_M}.enable_gradient_checkpointing", True)),
        attention=_attention(attention, flash_attn=flash_attn, on_cpu=on_cpu),
        log_prob_path=log_prob_path(
            flash=flash_attn and not on_cpu,
            fused=bool(get(f"{_M}.use_fused_kernels", False)),
            distills=bool(get("distillation.enabled", False)),
        ),
        device_type="cpu" if on_cpu else "cuda",
        softmax_bytes=get.bytes(f"{_A}.fsdp_config.mixed_precision.param_dtype", "bf16") if on_cpu else 4,
        entropy=_entropy(get),
        entropy_chunk=get.whole(f"{_A}.entropy_from_logits_chunk_size", 2048),
        update_entropy=bool(get(f"{_A}.calculate_entropy", False)) or get(f"{_A}.entropy_coeff", 0) != 0,
        unit_temperature=get.number(f"{_R}.temperature", 1.0) == 1.0,
        branches=gains and scorer.rides,
        weight_bytes=get.bytes(f"{_A}.fsdp_config.model_dtype", "fp32"),
        compute_bytes=get.bytes(f"{_A}.fsdp_config.mixed_precision.param_dtype", "bf16"),
        reduce_bytes=get.bytes(f"{_A}.fsdp_config.mixed_precision.reduce_dtype", "fp32"),
        reference_bytes=get.bytes("actor_rollout_ref.ref.fsdp_config.model_dtype", "bf16"),
        reference=bool(get(f"{_A}.use_kl_loss", False) or get("algorithm.use_kl_in_reward", False)),
        lora_rank=get.whole(f"{_M}.lora_rank", 0) or get.whole(f"{_M}.lora.rank", 0),
        shards=devices if fsdp_size <= 0 or fsdp_size >= devices else fsdp_size,
        sequence_parallel=parallel,
        reshard=bool(get(f"{_A}.fsdp_config.reshard_after_forward", True)),
        unsharded_gradients=bool(get(f"{_A}.fsdp_config.use_no_sync_for_gradient_accumulation", False)),
        offload_weights=bool(get(f"{_A}.fsdp_config.param_offload", False)),
        offload_optimizer=bool(get(f"{_A}.fsdp_config.optimizer_offload", False)),
        stays_on_host=bool(get(f"{_A}.fsdp_config.offload_policy", False)),
        fused_step=not on_cpu,
        engine=str(get(f"{_R}.name", "vllm")),
        engine_bytes=get.bytes(f"{_R}.dtype", "bfloat16"),
        tensor_parallel=get.count(f"{_R}.tensor_model_parallel_size", 1),
        model_len=_model_len(get),
        served_answers=gains and scorer.in_rollout,
        utilization=get.number(f"{_R}.gpu_memory_utilization", 0.5),
        sleeps=bool(get(f"{_R}.free_cache_engine", True)),
        max_seqs=get.count(f"{_R}.max_num_seqs", 256),
        bucket_bytes=get.whole(f"{_R}.checkpoint_engine.update_weights_bucket_megabytes", 2048) * 2**20,
        steps=get.whole("trainer.total_training_steps", None),
        passes=get.count("trainer.total_epochs", 1),
        save_every=get.whole("trainer.save_freq", -1),
        test_every=get.whole("trainer.test_freq", -1),
        val_first=bool(get("trainer.val_before_train", True)),
        val_rows=max(0, get.whole("data.val_max_samples", -1)),
        val_modes=len(get("evaluation.modes", ["greedy"])),
        val_samples=get.count(f"{_R}.val_kwargs.n", 1),
        search_timeout_s=get.number("search.timeout_s", 20.0),
        keep=get.whole("trainer.max_actor_ckpt_to_keep", None),
        named=tuple(get("keep_checkpoints", ())),
    )
    if job.engine != "hf" and devices % job.tensor_parallel:
        key = f"{_R}.tensor_model_parallel_size"
        raise ConfigError(f"{key}={job.tensor_parallel} does not divide {devices} devices", key=key)
    return replace(
        job,
        update_tokens=_tokens(get, _A, "ppo", job),
        log_prob_tokens=_tokens(get, _R, "log_prob", job),
    )


def _model_len(get: _Reader) -> int:
    key = f"{_R}.max_model_len"
    return 0 if get.whole(key, None) is None else get.count(key, 1)


def _attention(name: str, *, flash_attn: bool, on_cpu: bool) -> str:
    """``auto`` takes flash-attn where it is, else SDPA."""
    sdpa = on_cpu or name in ("credit_sdpa", "sdpa") or (name == "auto" and not flash_attn)
    return "sdpa" if sdpa else "flash"


def _entropy(get: _Reader) -> str:
    if get(f"{_A}.fsdp_config.entropy_from_logits_with_chunking", False):
        return "chunked"
    return "compiled" if get(f"{_A}.fsdp_config.use_torch_compile", True) else "eager"


def _tokens(get: _Reader, section: str, prefix: str, job: Job) -> int:
    """Tokens of one micro-batch on one device: the budget, or rows x the longest row, never more than the batch."""
    all_rows = job.rows if prefix == "log_prob" else job.mini_batch * job.rollouts
    rows = max(1, -(-all_rows // job.data_parallel))
    switch = "use_dynamic_bsz" if prefix == "ppo" else "log_prob_use_dynamic_bsz"
    if get(f"{section}.{switch}", False):
        return min(
            get.count(f"{section}.{prefix}_max_token_len_per_gpu", 16384), rows * job.longest_row
        )  # fmt: skip
    key = f"{section}.{prefix}_micro_batch_size_per_gpu"
    micro = get.whole(key, None)
    if micro is None:
        raise ConfigError(key=key, accepted=f"set it, or {section}.{switch}=true")
    return min(micro, rows) * job.longest_row // job.sequence_parallel


class _Reader:
    """Dotted look-up; a key that is absent gives the default."""

    def __init__(self, config: Mapping):
        self._config = config

    def __call__(self, key: str, default):
        node = self._config
        for part in key.split("."):
            if node is None or part not in node:
                return default
            node = node[part]
        return default if node is None else node

    def count(self, key: str, default: int) -> int:
        value = self(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(
                key=key, value=value, accepted="expected a whole number above 0", shown=repr(value)
            )
        return value

    def number(self, key: str, default: float | None) -> float | None:
        value = self(key, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise ConfigError(key=key, value=value, accepted="expected a number", shown=repr(value))
        return value

    def whole(self, key: str, default: int | None) -> int | None:
        value = self.number(key, default)
        if value is not None and value != int(value):
            raise ConfigError(key=key, value=value, accepted="expected a whole number", shown=repr(value))
        return None if value is None else int(value)

    def bytes(self, key: str, default: str) -> int:
        value = self(key, default)
        if str(value) not in BYTES:
            raise ConfigError(key=key, value=value, accepted=BYTES, shown=repr(value))
        return BYTES[str(value)]
