"""Makes a plan from a configuration, hardware and assumptions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from verl_credit.config.settings import INFOPO
from verl_credit.errors import ConfigError
from verl_credit.recipe.plan.compute import RunTime, Step, disk_bytes, run_steps, run_time, step
from verl_credit.recipe.plan.hardware import (
    Hardware,
    find_hardware,
    index_bytes,
    index_kind,
    index_numbers,
    index_place,
)
from verl_credit.recipe.plan.job import Assumptions, Job, assumptions
from verl_credit.recipe.plan.memory import Engine, Phase, engine, phases
from verl_credit.recipe.plan.model_shape import ModelShape, shape_of
from verl_credit.recipe.plan.read_job import read_job
from verl_credit.recipe.plan.remedies import Remedy, remedies
from verl_credit.recipe.plan.search import core_seconds, encoder_core_seconds
from verl_credit.recipe.plan.search import note as search_note

SHIPPED_WEIGHTS = "smollm2-135m"
LAB_VOCABULARY = {"full": 1767, "tiny": 767}  # by lab.size, in every world


@dataclass(frozen=True)
class Plan:
    """The contents of a plan, as `verl-credit plan` shows them."""

    recipe: str
    shape: ModelShape
    hardware: Hardware
    job: Job
    assumed: Assumptions
    given: tuple[str, ...]
    """Assumptions that the recipe or the command line set."""
    engine: Engine
    phases: list[Phase]
    step: Step
    steps: int | None
    run: RunTime | None
    disk: float | None
    remedies: list[Remedy]
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return all(phase.fits for phase in self.phases)

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
    block = dict(config.get("hardware") or {})
    notes = []
    name = hardware or block.get("name")
    if name is None:
        name = "cpu" if (config.get("trainer") or {}).get("device") == "cpu" else "h100"
        if name == "h100":
            notes.append(
                "the recipe names no hardware; the plan is for an H100 (--hardware NAME, or hardware.name)"
            )
    hw = find_hardware(name, {k: v for k, v in block.items() if k != "name"})
    trainer = dict(config.get("trainer") or {})
    if devices is not None:
        trainer["n_gpus_per_node"] = _per_node(devices, trainer.get("nnodes", 1))
    job = read_job({**config, "trainer": {**trainer, "device": hw.device}}, flash_attn=hw.flash_attn)
    if devices is None and block.get("devices") not in (None, job.devices):
        raise ConfigError(
            f"hardware.devices={block['devices']} but trainer.nnodes x trainer.n_gpus_per_node is {job.devices}"
        )
    given = dict(config.get("plan") or {})
    shape = shape_of(given.get("model") or _model(config))
    index, place = index_bytes(block), index_place(block)
    searching = core_seconds(index_kind(block), index_numbers(block), place)
    encoding = encoder_core_seconds(block, searching)
    assumed = assumptions(
        given, job, device=hw.device, mfu=hw.mfu, cores=hw.cores, search=searching, encoder=encoding
    )
    if place == "elsewhere" or job.max_turns == 1:  # no search on these machines
        index = 0.0
    elif not index:
        notes.append(
            "memory and time of the search index are not counted; give its size in hardware.index or "
            "hardware.index_bytes"
        )
    notes += _notes(job, hw)
    notes += _uncounted(config.get("algorithm") or {})

    def measure(changed: Job, bytes_of_index: float) -> list[Phase]:
        return phases(shape, changed, hw, assumed, index=bytes_of_index, place=place)

    runner = engine(shape, job, hw, assumed)
    if message := search_note(job, assumed, place):
        notes.append(message)
    steps, one = run_steps(job, assumed), step(shape, job, hw, assumed, runner)
    return Plan(
        recipe=recipe,
        shape=shape,
        hardware=hw,
        job=job,
        assumed=assumed,
        given=tuple(sorted(k for k in given if k != "model")),
        engine=runner,
        phases=measure(job, index),
        step=one,
        steps=steps,
        run=None if steps is None else run_time(shape, job, hw, assumed, runner, steps, one.total_seconds),
        disk=disk_bytes(shape, job, steps),
        remedies=remedies(shape, job, hw, assumed, index, measure, index_kind(block)),
        notes=tuple(notes),
    )


def _notes(job: Job, hw: Hardware) -> list[str]:
    notes = []
    if hw.unified and (job.offload_weights or job.offload_optimizer or job.stays_on_host):
        notes.append(f"{hw.name}: host and device share their memory, so offloading saves nothing")
    if job.lora_rank and job.weight_bytes == 4:
        notes.append(
            "LoRA keeps the frozen weights in fp32 (actor.fsdp_config.model_dtype); bf16 would halve them"
        )
    return notes


def _uncounted(algorithm: Mapping) -> list[str]:
    named = algorithm.get("turn_signals") or [algorithm.get("turn_signal")]
    if INFOPO not in named or algorithm.get("info_gain_norm_mode") == "none":
        return []
    return [
        "what the turn signal infopo scores is not counted: nearly as many tokens once more as the policy wrote, after the "
        "rows of log-probs (info_gain_scorer=branch) or as rows of their own (rows)"
    ]


def _model(config: Mapping) -> str | Mapping:
    model = ((config.get("actor_rollout_ref") or {}).get("model") or {}).get("path")
    if not model or not isinstance(model, str):
        how = "give a model folder or name, or plan.model"
        raise ConfigError(key="actor_rollout_ref.model.path", value=model, accepted=how)
    if _unbuilt(config, "real", model):
        return SHIPPED_WEIGHTS
    return _lab_policy(config["lab"]) if _unbuilt(config, "lab", model) else model


def _unbuilt(config: Mapping, section: str, model: str) -> bool:
    """A folder that the run builds before its first step, and has not built yet."""
    folder = (config.get(section) or {}).get("dir")
    return folder is not None and Path(model).is_relative_to(folder) and not Path(model).exists()


def _lab_policy(lab: Mapping) -> Mapping:
    """The config.json that a build of this lab writes (tests compare)."""
    return {
        "_name_or_path": "the lab's policy", "model_type": "qwen3", "hidden_size": 128,
        "vocab_size": LAB_VOCABULARY[lab["size"]],
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 256,
        "tie_word_embeddings": True, "max_position_embeddings": 1024,
    }  # fmt: skip


def _per_node(devices: int, nodes: int) -> int:
    if devices < 1 or devices % nodes:
        raise ConfigError(
            f"--devices {devices} over trainer.nnodes={nodes} nodes: expected a multiple of {nodes}"
        )
    return devices // nodes
