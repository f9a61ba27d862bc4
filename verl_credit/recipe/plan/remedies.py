"""Overrides that make a plan fit, the cheapest for the run first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from verl_credit.config.engines import engine_named
from verl_credit.config.fit import engine_tokens, least_log_prob_tokens
from verl_credit.policy.log_prob_path import FLASH, LOOP
from verl_credit.recipe.plan.assumptions import Assumptions
from verl_credit.recipe.plan.hardware import BYTES_PER_NUMBER, GIB, Hardware, Index
from verl_credit.recipe.plan.job import Job
from verl_credit.recipe.plan.memory import Phase, engine, phases
from verl_credit.recipe.plan.model_shape import ModelShape

LORA_RANK = 32
MODEL, ACTOR, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("model", "actor", "rollout"))
FSDP = f"{ACTOR}.fsdp_config"
SMALL = "sq8"


@dataclass(frozen=True)
class Remedy:
    """Overrides that help, and the bytes that are still missing with them (0 or less: the plan fits)."""

    what: str
    overrides: tuple[str, ...]
    missing: float


def missing(found: list[Phase]) -> float:
    """Bytes over capacity, summed over the phases that do not fit; a problem counts as a GiB."""
    return sum(max(0.0, p.total - p.capacity) + GIB * len(p.problems) for p in found)


@dataclass(frozen=True)
class Case:
    """The inputs of a plan with the remedies so far, for which the next one is proposed."""

    shape: ModelShape
    job: Job
    hw: Hardware
    assumed: Assumptions
    index: Index

    def phases(self) -> list[Phase]:
        return phases(self.shape, self.job, self.hw, self.assumed, self.index)

    def changed(self, **changes) -> Case:
        return replace(self, job=replace(self.job, **changes))


def remedies(case: Case) -> list[Remedy]:
    """Returns remedies until the plan fits, each added to the earlier ones; remedies without effect are left out.

    `validate` accepts the overrides of every remedy.
    """
    chosen: list[Remedy] = []
    short = missing(case.phases())
    for propose in LADDER:
        if short <= 0:
            break
        for what, overrides, changed in propose(case):
            now = missing(changed.phases())
            if now < short:
                case, short = changed, now
                chosen = [r for r in chosen if r.what != what] + [Remedy(what, overrides, now)]
            if short <= 0:
                break
    return chosen


Candidate = tuple[str, tuple[str, ...], Case]
Propose = Callable[[Case], Iterator[Candidate]]


def _switch(what: str, needed: Callable[[Job, Hardware], bool], *overrides: str, **changes) -> Propose:
    """A remedy that changes fields of the job in one way, where the job needs it."""

    def propose(case: Case) -> Iterator[Candidate]:
        if needed(case.job, case.hw):
            yield what, overrides, case.changed(**changes)

    return propose


def _shorter_sequences(case: Case) -> Iterator[Candidate]:
    """The engine reserves cache for one sequence of max_model_len; the longest row is enough."""
    least = engine_tokens(case.job.longest_row, case.job.served_answers, engine=case.job.engine)
    length = case.job.model_len or case.shape.positions or least
    if engine_named(case.job.engine).reserves and length > least:
        key = f"{ROLLOUT}.max_model_len={least}"
        yield "sequences no longer than the rows", (key,), case.changed(model_len=least)


def _larger_share(case: Case) -> Iterator[Candidate]:
    """The engine's share cannot hold its weights and one row."""
    share = case.job.utilization
    while _too_small(case, share) and share < 0.94:
        share = round(share + 0.05, 2)
    if share > case.job.utilization:
        yield _share("give the engine a larger share", case, share)


def _micro_batch(case: Case) -> Iterator[Candidate]:
    """Halve the tokens down to the longest row (for log-probs, with its scored answers), or the rows down to one."""
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
        changed = case.changed(update_tokens=update, log_prob_tokens=log_prob)
        yield "a smaller micro-batch", overrides, changed


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
        changed = case.changed(update_tokens=update, log_prob_tokens=log_prob)
        yield "a smaller micro-batch", overrides, changed


def _smaller_share(case: Case) -> Iterator[Candidate]:
    share = case.job.utilization
    while (engine_named(case.job.engine).reserves or case.hw.device == "cuda") and share > 0.1:
        share = round(share - 0.05, 2)
        if _too_small(case, share):
            return
        yield _share("a smaller engine share", case, share)


def _quantised_index(case: Case) -> Iterator[Candidate]:
    """The index has larger vectors than sq8; one that is given only by its size is left alone."""
    ratio = BYTES_PER_NUMBER[SMALL] / BYTES_PER_NUMBER.get(case.index.kind, BYTES_PER_NUMBER[SMALL])
    if case.index.bytes and ratio < 1:
        smaller = replace(case.index, bytes=case.index.bytes * ratio)
        yield "an 8-bit index", (f"hardware.index.kind={SMALL}",), replace(case, index=smaller)


def _too_small(case: Case, share: float) -> bool:
    return bool(engine(case.shape, replace(case.job, utilization=share), case.hw, case.assumed).problems)


def _share(what: str, case: Case, share: float) -> Candidate:
    key = f"{ROLLOUT}.gpu_memory_utilization={share:g}"
    return what, (key,), case.changed(utilization=share)


LADDER: tuple[Propose, ...] = (
    _shorter_sequences,
    _larger_share,
    _switch("gradient checkpointing", lambda job, hw: not job.checkpointing,
            f"{MODEL}.enable_gradient_checkpointing=true", checkpointing=True),
    _switch("entropy in chunks", lambda job, hw: job.entropy == "eager" and job.log_prob_path in (FLASH, LOOP),
            f"{ACTOR}.entropy_from_logits_with_chunking=true", entropy="chunked"),
    _micro_batch,
    # the hf engine takes whole weights only
    _switch("LoRA", lambda job, hw: not job.lora_rank and engine_named(job.engine).reserves,
            f"{MODEL}.lora_rank={LORA_RANK}", f"{ROLLOUT}.load_format=safetensors", lora_rank=LORA_RANK),
    _switch("LoRA on bf16 weights", lambda job, hw: job.lora_rank > 0 and job.weight_bytes == 4,
            f"{FSDP}.model_dtype=bf16", weight_bytes=2),
    _switch("optimizer offload", lambda job, hw: not hw.unified and not job.offload_optimizer,
            f"{FSDP}.optimizer_offload=true", offload_optimizer=True),
    _switch("weight offload", lambda job, hw: not hw.unified and not job.offload_weights,
            f"{FSDP}.param_offload=true", offload_weights=True),
    _smaller_share,
    _quantised_index,
)  # fmt: skip
