"""What to change when a plan does not fit, in order of what it costs the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from verl_credit.plan.hardware import GIB, Hardware
from verl_credit.plan.job import Assumptions, Job
from verl_credit.plan.memory import RESERVING, Phase, engine
from verl_credit.plan.model_shape import ModelShape

LORA_RANK = 32
FSDP = "actor_rollout_ref.actor.fsdp_config"
ROLLOUT = "actor_rollout_ref.rollout"
Measure = Callable[[Job, float], list[Phase]]
"""(job, bytes of the index) -> phases"""


@dataclass(frozen=True)
class Remedy:
    """Overrides that help, and what is then missing (bytes over what is there; 0 or less: it fits)."""

    what: str
    overrides: tuple[str, ...]
    missing: float


def missing(found: list[Phase]) -> float:
    """Bytes over capacity, summed over the phases that do not fit; a problem counts as a GiB."""
    return sum(max(0.0, p.total - p.capacity) + GIB * len(p.problems) for p in found)


def remedies(
    shape: ModelShape, job: Job, hw: Hardware, assumed: Assumptions, index: float, measure: Measure
) -> list[Remedy]:
    """Taken one after the other, each on top of those before, until everything fits; those without effect are left out."""
    chosen: list[Remedy] = []
    short = missing(measure(job, index))
    for what in LADDER:
        if short <= 0:
            break
        for name, overrides, changed, smaller in what(shape, job, hw, assumed, index):
            now = missing(measure(changed, smaller))
            if now < short:
                job, index, short = changed, smaller, now
                chosen = [r for r in chosen if r.what != name] + [Remedy(name, overrides, now)]
            if short <= 0:
                break
    return chosen


Candidate = tuple[str, tuple[str, ...], Job, float]


def _larger_share(shape, job, hw, assumed, index) -> Iterator[Candidate]:
    """The engine cannot hold its weights and one row."""
    share = job.utilization
    while engine(shape, replace(job, utilization=share), hw, assumed).problems and share < 0.94:
        share = round(share + 0.05, 2)
    if share > job.utilization:
        yield (
            "give the engine a larger share",
            (f"{ROLLOUT}.gpu_memory_utilization={share:g}",),
            replace(job, utilization=share),
            index,
        )


def _checkpointing(shape, job, hw, assumed, index) -> Iterator[Candidate]:
    if not job.checkpointing:
        key = "actor_rollout_ref.model.enable_gradient_checkpointing=true"
        yield "gradient checkpointing", (key,), replace(job, checkpointing=True), index


def _chunked_entropy(shape, job, hw, assumed, index) -> Iterator[Candidate]:
    if job.entropy == "eager" and not job.fused_loss:
        key = "actor_rollout_ref.actor.entropy_from_logits_with_chunking=true"
        yield "entropy in chunks", (key,), replace(job, entropy="chunked"), index


def _micro_batch(shape, job, hw, assumed, index) -> Iterator[Candidate]:
    """Halved down to the longest row, which has to fit."""
    tokens = max(job.update_tokens, job.log_prob_tokens)
    least = -(-job.longest_row // job.sequence_parallel)
    while tokens > least:
        tokens = max(least, tokens // 2)
        yield (
            "a smaller micro-batch",
            (
                f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={tokens}",
                f"{ROLLOUT}.log_prob_max_token_len_per_gpu={tokens}",
            ),
            replace(
                job,
                update_tokens=min(tokens, job.update_tokens),
                log_prob_tokens=min(tokens, job.log_prob_tokens),
            ),
            index,
        )


def _lora(shape, job, hw, assumed, index) -> Iterator[Candidate]:
    if not job.lora_rank:
        overrides = (f"actor_rollout_ref.model.lora_rank={LORA_RANK}", f"{ROLLOUT}.load_format=safetensors")
        yield "LoRA", overrides, replace(job, lora_rank=LORA_RANK), index
        job = replace(job, lora_rank=LORA_RANK)
    if job.weight_bytes == 4:
        key = f"{FSDP}.model_dtype=bf16"
        yield "LoRA on bf16 weights", (key,), replace(job, weight_bytes=2), index


def _offload(shape, job, hw, assumed, index) -> Iterator[Candidate]:
    if hw.unified:
        return  # the host's memory is the device's
    if not job.offload_optimizer:
        job = replace(job, offload_optimizer=True)
        yield "optimizer offload", (f"{FSDP}.optimizer_offload=true",), job, index
    if not job.offload_weights:
        yield "weight offload", (f"{FSDP}.param_offload=true",), replace(job, offload_weights=True), index


def _smaller_share(shape, job, hw, assumed, index) -> Iterator[Candidate]:
    share = job.utilization
    while job.engine in RESERVING and share > 0.1:
        share = round(share - 0.05, 2)
        smaller = replace(job, utilization=share)
        if engine(shape, smaller, hw, assumed).problems:
            return
        yield "a smaller engine share", (f"{ROLLOUT}.gpu_memory_utilization={share:g}",), smaller, index


def _quantised_index(shape, job, hw, assumed, index) -> Iterator[Candidate]:
    if index:
        yield "an 8-bit index", ("hardware.index.kind=sq8",), job, index / 4


LADDER = (
    _larger_share, _checkpointing, _chunked_entropy, _micro_batch, _lora, _offload, _smaller_share, _quantised_index,
)  # fmt: skip
