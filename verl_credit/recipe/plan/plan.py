"""Makes a plan from a configuration, hardware and assumptions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from verl_credit.config.engines import engine_named
from verl_credit.config.fit import LOG_PROB, MODEL_LEN
from verl_credit.config.gone import gone_key
from verl_credit.config.log_prob_path import FLASH, LOOP
from verl_credit.credit.turn.value_providers import PROVIDERS
from verl_credit.errors import ConfigError, unknown_key
from verl_credit.recipe.plan.assumptions import Assumptions
from verl_credit.recipe.plan.compute import RunTime, Step, disk_bytes, run_steps, run_time, step
from verl_credit.recipe.plan.hardware import Hardware, Index, find_hardware, find_index
from verl_credit.recipe.plan.job import Job, read_job, require_number
from verl_credit.recipe.plan.memory import SHARE, EngineMemory, Phase, engine_memory, phases
from verl_credit.recipe.plan.model_shape import ModelShape, shape_of
from verl_credit.redact import redact_value

ACTOR = "actor_rollout_ref.actor"
SMALLER = f"{ACTOR}.ppo_max_token_len_per_gpu, {LOG_PROB}"
SHIPPED_WEIGHTS = "smollm2-135m"
LAB_POLICIES = {
    size: ModelShape("the lab's policy", "qwen3", 3, 128, 4, 2, 32, 256, words, True, positions=1024)
    for size, words in (("full", 1767), ("tiny", 767))  # every world of a size has as many words
}
"""The policy that a build of this lab.size makes (tests compare)."""
DOORKEY_POLICY = ModelShape("DoorKey's policy", "qwen3", 3, 128, 4, 2, 32, 256, 645, True, positions=1024)


@dataclass(frozen=True)
class Plan:
    """The contents of a plan, as `verl-credit plan` shows them."""

    recipe: str
    shape: ModelShape
    hardware: Hardware
    job: Job
    assumed: Assumptions
    index: Index
    given: tuple[str, ...]
    """Assumptions that the recipe or the command line set."""
    engine: EngineMemory
    phases: list[Phase]
    step: Step
    steps: int | None
    run: RunTime | None
    disk: float | None
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return all(phase.fits for phase in self.phases)

    @property
    def remedies(self) -> list[str]:
        """The settings that need less memory and that the recipe does not have, the cheapest for the run first."""
        job, hw, engine = self.job, self.hardware, engine_named(self.job.engine)
        longer = engine.reserves and (job.model_len or self.shape.positions or 0) > job.longest_row
        eager = job.entropy == "eager" and job.log_prob_path in (FLASH, LOOP)
        whole = engine.adapters and not job.lora_rank
        large = self.index.bytes > 0 and self.index.kind not in (None, "sq8")
        fsdp = f"{ACTOR}.fsdp_config"
        wanted = {
            f"{MODEL_LEN}=auto": longer,
            "actor_rollout_ref.model.enable_gradient_checkpointing=true": not job.checkpointing,
            f"{ACTOR}.entropy_from_logits_with_chunking=true": eager,
            f"smaller micro-batches ({SMALLER}), down to a row of {job.longest_row} tokens": True,
            "actor_rollout_ref.model.lora_rank=32, with rollout.load_format=safetensors": whole,
            f"{fsdp}.model_dtype=bf16": job.lora_rank > 0 and job.weight_bytes == 4,
            f"{fsdp}.optimizer_offload=true": not hw.unified and not job.offload_optimizer,
            f"{fsdp}.param_offload=true": not hw.unified and not job.offload_weights,
            f"another {SHARE}": engine.reserves,
            "hardware.index.kind=sq8, an index of 8 bits a number": large,
        }
        return [] if self.fits else [text for text, helps in wanted.items() if helps]

    @property
    def peak(self) -> Phase:
        """The fullest phase on the device."""
        return max((p for p in self.phases if p.where == "device"), key=lambda p: p.total)


def make_plan(
    config: Mapping, *, recipe: str = "", hardware: str | None = None, devices: int | None = None
) -> Plan:
    """Plan a composed configuration (plain dictionaries). ``hardware`` and ``devices`` override the recipe's.

    Raises `ConfigError` naming the key that is missing or wrong.
    """
    block, trainer = dict(config.get("hardware") or {}), dict(config.get("trainer") or {})
    notes = []
    name = hardware or block.get("name")
    if name is None and trainer.get("device") == "cpu":
        name = "cpu"
    elif name is None:
        name = "h100"
        notes.append(
            "the recipe names no hardware; the plan is for an H100 (--hardware NAME, or hardware.name)"
        )
    hw = find_hardware(name, block)
    if devices is not None:
        nodes = trainer.get("nnodes", 1)
        if devices < 1 or devices % nodes:
            raise ConfigError(
                f"--devices {devices} over trainer.nnodes={nodes} nodes: expected a multiple of {nodes}"
            )
        trainer["n_gpus_per_node"] = devices // nodes
    job = read_job({**config, "trainer": {**trainer, "device": hw.device}}, flash_attn=hw.flash_attn)
    if devices is None and block.get("devices") not in (None, job.devices):
        raise ConfigError(
            f"hardware.devices={block['devices']} but trainer.nnodes x trainer.n_gpus_per_node is {job.devices}"
        )
    given = dict(config.get("plan") or {})
    own = given.pop("model", None)
    shape = shape_of(own) if own else _shape(config)
    index = find_index(block)
    assumed = assumptions(given, job, hw)
    if index.place != "host":
        assumed = replace(assumed, search_core_seconds=0.0)
    if index.place == "elsewhere" or not job.searches:  # no search on these machines
        index = replace(index, bytes=0.0)
    runner = engine_memory(shape, job, hw, assumed)
    steps, one = run_steps(job, assumed), step(shape, job, hw, assumed, runner)
    return Plan(
        recipe=recipe,
        shape=shape,
        hardware=hw,
        job=job,
        assumed=assumed,
        index=index,
        given=tuple(sorted(given)),
        engine=runner,
        phases=phases(shape, job, hw, assumed, index),
        step=one,
        steps=steps,
        run=None if steps is None else run_time(shape, job, hw, assumed, runner, steps, one.total_seconds),
        disk=disk_bytes(shape, job, steps),
        notes=(*notes, *_notes(shape, job, hw, assumed, index, config.get("algorithm") or {})),
    )


def assumptions(given: Mapping, job: Job, hw: Hardware) -> Assumptions:
    """``plan.*`` of a recipe over the defaults. Raises `ConfigError` for unknown or negative values."""
    known = {entry.name for entry in fields(Assumptions)}
    for key, value in given.items():
        if key not in known:
            before = gone_key(f"plan.{key}")
            raise unknown_key("plan", key, ["model", *sorted(known)], redact_value(key, value), remedy=before)
        require_number(f"plan.{key}", value, "a number, 0 or more", lambda v: 0 <= v < float("inf"))
    response = given.get("mean_response_tokens") or job.max_response / 2
    defaults: dict[str, Any] = {
        "mean_prompt_tokens": job.max_prompt / 4,
        "mean_response_tokens": response,
        "mean_generated_tokens": response * (0.35 if job.max_turns > 1 else 1.0),
        "mean_turns": max(1.0, job.max_turns / 2),
        "mfu": hw.mfu,
        "branch_kernel_share": 0.12 if job.attention == "sdpa" else 0.06,
        "host_cores": hw.cores,
        "host_gib": 8 + 3 * job.per_node,
    }
    if hw.device == "cpu":
        defaults |= {"host_gib": 3.5, "context_gib": 0.0, "fragmentation": 0.0, "step_overhead_seconds": 2.0}
        defaults["branch_kernel_share"] = 0.0
    result = Assumptions(**defaults | dict(given))
    for key in ("mfu", "host_cores", "disk_gb_s", "gain_store_gb_s", "decode_efficiency"):
        require_number(f"plan.{key}", getattr(result, key), "a number above 0", lambda v: v > 0)
    return result


def _notes(
    shape: ModelShape, job: Job, hw: Hardware, assumed: Assumptions, index: Index, algorithm: Mapping
) -> list[str]:
    """Returns notes about what the plan leaves out, what saves nothing, and searches that would exceed their timeout."""
    searches = job.searches
    provider = PROVIDERS.get(algorithm.get("turn_values") or "")
    no_size = searches and index.place != "elsewhere" and not index.bytes
    pooled = hw.unified and (job.offload_weights or job.offload_optimizer or job.stays_on_host)
    frozen = job.lora_rank and job.weight_bytes == 4
    idle = searches and not assumed.search_core_seconds
    llama = (
        f"model_type={shape.family} counts as a llama of its sizes; it may have a few per cent more or less"
    )
    size = "memory and time of the search index are not counted; give its size in hardware.index or hardware.index_bytes"
    notes = {
        llama: shape.estimated,
        size: no_size,
        f"{hw.name}: host and device share their memory, so offloading saves nothing": pooled,
        "LoRA keeps the frozen weights in fp32 (actor.fsdp_config.model_dtype); bf16 would halve them": frozen,
        provider.uncounted if provider else "": provider and provider.uncounted,
        "the computing of searches is not counted (hardware.index.place, plan.search_core_seconds)": idle,
    }
    # All rows' first turns fit into the cache, because they are short.
    queries = min(job.rows, job.max_seqs * max(1, job.devices // job.tensor_parallel))
    each = assumed.search_core_seconds
    wave = queries * each / assumed.host_cores
    late = (
        f"{queries:.0f} rows may search at once, and {queries:.0f} queries of {each:.2f} core-seconds take {wave:.0f} s on "
        f"{assumed.host_cores:.0f} cores, longer than search.timeout_s={job.search_timeout_s:g}: rows would be lost; use "
        "another kind of index (flat, hnsw), more cores, or a longer timeout"
    )
    notes[late] = searches and wave > job.search_timeout_s
    return [note for note, holds in notes.items() if holds]


def _shape(config: Mapping) -> ModelShape:
    """The recipe's model; for a folder that the run builds before its first step the model that will be in it."""
    model = ((config.get("actor_rollout_ref") or {}).get("model") or {}).get("path")
    if not model or not isinstance(model, str):
        how = "give a model folder or name, or plan.model"
        raise ConfigError(key="actor_rollout_ref.model.path", value=model, accepted=how)
    for section in ("real", "lab", "doorkey"):
        world = config.get(section) or {}
        if "dir" in world and Path(model).is_relative_to(world["dir"]) and not Path(model).exists():
            built = {"lab": LAB_POLICIES.get(world["size"]), "doorkey": DOORKEY_POLICY}
            return built.get(section) or shape_of(SHIPPED_WEIGHTS)
    return shape_of(model)
