"""Overrides that make a plan fit, the cheapest for the run first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from verl_credit.config.fit import engine_tokens, least_log_prob_tokens
from verl_credit.policy.log_probs import FLASH, LOOP
from verl_credit.recipe.plan.hardware import BYTES_PER_NUMBER, GIB, Hardware
from verl_credit.recipe.plan.job import Assumptions, Job
from verl_credit.recipe.plan.memory import RESERVING, Phase, engine
from verl_credit.recipe.plan.model_shape import ModelShape

LORA_RANK = 32
FSDP = "actor_rollout_ref.actor.fsdp_config"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SMALL = "sq8"
Measure = Callable[[Job, float], list[Phase]]
"""(job, bytes of the index) -> phases"""


@dataclass(frozen=True)
class Remedy:
    """Overrides that help, and the bytes that are still missing with them (0 or less: the plan fits)."""

    what: str
    overrides: tuple[str, ...]
    missing: float


def missing(found: list[Phase]) -> float:
    """Bytes over capacity, summed over the phases that do not fit; a problem counts as a GiB."""
    return sum(max(0.0, p.total - p.capacity) + GIB * len(p.problems) for p in found)


def remedies(
    shape: ModelShape,
    job: Job,
    hw: Hardware,
    assumed: Assumptions,
    index: float,
    measure: Measure,
    kind: str | None = None,
) -> list[Remedy]:
    """Returns remedies until the plan fits, each added to the earlier ones; remedies without effect are left out.

    ``kind``: the index's, None when only its size is known. `validate` accepts the overrides of every remedy.
    """
    chosen: list[Remedy] = []
    short = missing(measure(job, index))
    for what in LADDER:
        if short <= 0:
            break
        for name, overrides, changed, smaller in what(Case(shape, job, hw, assumed, index, kind)):
            now = missing(measure(changed, smaller))
            if now < short:
                job, index, short = changed, smaller, now
                chosen = [r for r in chosen if r.what != name] + [Remedy(name, overrides, now)]
            if short <= 0:
                break
    return chosen


Candidate = tuple[str, tuple[str, ...], Job, float]


@dataclass(frozen=True)
class Case:
    """The plan with the remedies so far, for which the next one is proposed."""

    shape: ModelShape
    job: Job
    hw: Hardware
    assumed: Assumptions
    index: float
    kind: str | None


def _shorter_sequences(case: Case) -> Iterator[Candidate]:
    """The engine reserves cache for one sequence of max_model_len; the longest row is enough."""
    least = engine_tokens(case.job.longest_row, case.job.served_answers)
    length = case.job.model_len or case.shape.positions or least
    if case.job.engine in RESERVING and length > least:
        key = f"{ROLLOUT}.max_model_len={least}"
        yield "sequences no longer than the rows", (key,), replace(case.job, model_len=least), case.index


def _larger_share(case: Case) -> Iterator[Candidate]:
    """The engine's share cannot hold its weights and one row."""
    share = case.job.utilization
    while _too_small(case, share) and share < 0.94:
        share = round(share + 0.05, 2)
    if share > case.job.utilization:
        yield _share("give the engine a larger share", case, share)


def _checkpointing(case: Case) -> Iterator[Candidate]:
    if not case.job.checkpointing:
        key = "actor_rollout_ref.model.enable_gradient_checkpointing=true"
        yield "gradient checkpointing", (key,), replace(case.job, checkpointing=True), case.index


def _chunked_entropy(case: Case) -> Iterator[Candidate]:
    if case.job.entropy == "eager" and case.job.log_prob_path in (FLASH, LOOP):
        key = f"{ACTOR}.entropy_from_logits_with_chunking=true"
        yield "entropy in chunks", (key,), replace(case.job, entropy="chunked"), case.index


def _micro_batch(case: Case) -> Iterator[Candidate]:
    """Halve the tokens down to the longest row; for log-probs, with its scored answers."""
    job = case.job
    if not job.dynamic:
        yield from _fewer_rows(case)
        return
    update, log_prob = job.update_tokens, job.log_prob_tokens
    least = job.longest_row, least_log_prob_tokens(job.longest_row, job.max_turns)
    while update > least[0] or log_prob > least[1]:
        half = max(update, log_prob) // 2
        update, log_prob = min(update, max(least[0], half)), min(log_prob, max(least[1], half))
        overrides = (
            f"{ACTOR}.ppo_max_token_len_per_gpu={max(update, least[0])}",
            f"{ROLLOUT}.log_prob_max_token_len_per_gpu={max(log_prob, least[1])}",
        )
        changed = replace(job, update_tokens=update, log_prob_tokens=log_prob)
        yield "a smaller micro-batch", overrides, changed, case.index


def _fewer_rows(case: Case) -> Iterator[Candidate]:
    """Halve the rows, for micro-batches counted in rows."""
    job = case.job
    per_row = max(1, job.longest_row // job.sequence_parallel)
    rows = max(job.update_tokens, job.log_prob_tokens) // per_row
    while rows > 1:
        rows //= 2
        tokens = rows * per_row
        overrides = (
            f"{ACTOR}.ppo_micro_batch_size_per_gpu={rows}",
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu={rows}",
        )
        update, log_prob = min(tokens, job.update_tokens), min(tokens, job.log_prob_tokens)
        changed = replace(job, update_tokens=update, log_prob_tokens=log_prob)
        yield "a smaller micro-batch", overrides, changed, case.index


def _lora(case: Case) -> Iterator[Candidate]:
    if not case.job.lora_rank and case.job.engine in RESERVING:  # the hf engine takes whole weights only
        overrides = (f"actor_rollout_ref.model.lora_rank={LORA_RANK}", f"{ROLLOUT}.load_format=safetensors")
        yield "LoRA", overrides, replace(case.job, lora_rank=LORA_RANK), case.index


def _frozen_in_bf16(case: Case) -> Iterator[Candidate]:
    if case.job.lora_rank and case.job.weight_bytes == 4:
        key = f"{FSDP}.model_dtype=bf16"
        yield "LoRA on bf16 weights", (key,), replace(case.job, weight_bytes=2), case.index


def _offload_optimizer(case: Case) -> Iterator[Candidate]:
    if not case.hw.unified and not case.job.offload_optimizer:
        job = replace(case.job, offload_optimizer=True)
        yield "optimizer offload", (f"{FSDP}.optimizer_offload=true",), job, case.index


def _offload_weights(case: Case) -> Iterator[Candidate]:
    if not case.hw.unified and not case.job.offload_weights:
        job = replace(case.job, offload_weights=True)
        yield "weight offload", (f"{FSDP}.param_offload=true",), job, case.index


def _smaller_share(case: Case) -> Iterator[Candidate]:
    share = case.job.utilization
    while case.job.engine in RESERVING and share > 0.1:
        share = round(share - 0.05, 2)
        if _too_small(case, share):
            return
        yield _share("a smaller engine share", case, share)


def _quantised_index(case: Case) -> Iterator[Candidate]:
    """The index has larger vectors than sq8; one that is given only by its size is left alone."""
    if case.index and case.kind in BYTES_PER_NUMBER and BYTES_PER_NUMBER[case.kind] > BYTES_PER_NUMBER[SMALL]:
        ratio = BYTES_PER_NUMBER[SMALL] / BYTES_PER_NUMBER[case.kind]
        yield "an 8-bit index", (f"hardware.index.kind={SMALL}",), case.job, case.index * ratio


def _too_small(case: Case, share: float) -> bool:
    return bool(engine(case.shape, replace(case.job, utilization=share), case.hw, case.assumed).problems)


def _share(what: str, case: Case, share: float) -> Candidate:
    key = f"{ROLLOUT}.gpu_memory_utilization={share:g}"
    return what, (key,), replace(case.job, utilization=share), case.index


LADDER = (
    _shorter_sequences, _larger_share, _checkpointing, _chunked_entropy, _micro_batch, _lora, _frozen_in_bf16,
    _offload_optimizer, _offload_weights, _smaller_share, _quantised_index,
)  # fmt: skip
