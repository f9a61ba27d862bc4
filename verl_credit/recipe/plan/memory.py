"""Memory of a device in each phase of a colocated step, and of the host. Every part is a number of bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from verl_credit.config.engines import engine_named
from verl_credit.config.fit import MODEL_LEN
from verl_credit.recipe.plan.assumptions import Assumptions
from verl_credit.recipe.plan.hardware import GIB, NO_INDEX, Hardware, Index
from verl_credit.recipe.plan.job import Job
from verl_credit.recipe.plan.model_shape import ModelShape
from verl_credit.recipe.plan.update_memory import (
    KEPT,
    kept_parameters,
    log_prob_parts,
    probe_parts,
    state,
    update_parts,
)

ASLEEP = "engine weights asleep"
SHARE = "actor_rollout_ref.rollout.gpu_memory_utilization"


@dataclass(frozen=True)
class Phase:
    """A moment at which memory peaks: its place ("device" or "host"), its parts, and the capacity."""

    name: str
    where: str
    parts: dict[str, float]
    capacity: float
    problems: tuple[str, ...] = ()
    live: tuple[str, ...] = ()
    """The parts that are live tensors of the actor's process, as torch counts them there."""

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def live_bytes(self) -> float:
        return sum(self.parts[name] for name in self.live)

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity and not self.problems


@dataclass(frozen=True)
class EngineMemory:
    """The rollout engine on one device."""

    share: float
    weights: float
    kv: float
    """Bytes for keys and values: left of the share or, for an engine that reserves none, used."""
    kv_per_token: float
    problems: tuple[str, ...] = ()

    @property
    def kv_tokens(self) -> float:
        return max(0.0, self.kv) / self.kv_per_token


def engine_memory(shape: ModelShape, job: Job, hw: Hardware, assumed: Assumptions) -> EngineMemory:
    """The memory that a rollout engine takes: a share of the device that it reserves, or what its rows need."""
    if engine_named(job.engine).reserves:
        return _reserved(shape, job, hw, assumed)
    weights, per_token = shape.parameters * job.engine_bytes, shape.kv_bytes_per_token(job.engine_bytes)
    rows = min(job.max_seqs, job.rows)
    kv, last_logits = rows * job.longest_row * per_token, 2 * rows * shape.vocabulary * 4
    return EngineMemory(weights + kv + last_logits, weights, kv, per_token)


def _reserved(shape: ModelShape, job: Job, hw: Hardware, assumed: Assumptions) -> EngineMemory:
    """``gpu_memory_utilization`` of the device holds weights, activations, and the rest is cache."""
    split, share = job.tensor_parallel, job.utilization * hw.memory
    per_token = shape.kv_bytes_per_token(job.engine_bytes) / min(split, shape.kv_heads)
    weights = shape.parameters * job.engine_bytes / split
    kv = share - weights - assumed.engine_activation_gib * GIB
    length = job.model_len or shape.positions or job.longest_row
    need, problems = length * per_token, []
    if shape.positions and max(length, job.longest_row) > shape.positions:
        lengths = f"{MODEL_LEN}={length}, rows of {job.longest_row} tokens"
        problems.append(f"{lengths}: {shape.name} has {shape.positions} positions")
    if kv < need:
        least = (weights + assumed.engine_activation_gib * GIB + need) / hw.memory
        enough = f"at least {least + 0.005:.2f}" if least < 1 else "more than the device has"
        source = "" if job.model_len else f" ({MODEL_LEN}=null: all positions of the model)"
        problems.append(
            f"{SHARE}={job.utilization:g} leaves {max(kv, 0) / GIB:.1f} GiB of cache; one row of {length} tokens{source} "
            f"needs {need / GIB:.1f} GiB, hence {enough}"
        )
    return EngineMemory(share, weights, kv, per_token, tuple(problems))


def branch_tokens(job: Job, assumed: Assumptions) -> int:
    """Tokens of the answers scored in one log-prob micro-batch: one answer per turn and row, and one for the prompt."""
    if not job.branches:
        return 0
    rows = max(1.0, job.log_prob_tokens / max(1.0, assumed.row_tokens))
    return int(rows * (assumed.mean_turns + 1) * assumed.branch_tokens)


def phases(
    shape: ModelShape, job: Job, hw: Hardware, assumed: Assumptions, index: Index = NO_INDEX
) -> list[Phase]:
    """Every phase of a step in order, then the host. On unified memory the host's parts count on the device."""
    if hw.unified:  # offloading has no other memory to use
        job = replace(job, offload_weights=False, offload_optimizer=False, stays_on_host=False)
    runner, held, on_host = engine_memory(shape, job, hw, assumed), state(shape, job), job.stays_on_host
    weights = held["weights"]
    resident = {
        "weights": 0.0 if job.offload_weights or on_host else weights,
        "optimizer": 0.0 if job.offload_optimizer or on_host else held["optimizer"],
    }
    asleep = _asleep(job, runner, assumed)
    kept = kept_parameters(shape, job)
    offloaded = job.offload_weights or on_host  # then the kept parameters are there, too
    beside = {} if offloaded else {KEPT: kept}
    host = host_parts(shape, job, hw, assumed, index=index.bytes if index.place == "host" else 0.0)
    fixed = {"contexts": (2 if hw.device == "cuda" else 0) * assumed.context_gib * GIB}
    fixed["index"] = index.bytes if index.place == "device" else 0.0
    if hw.unified:
        fixed |= {f"host: {part}": value for part, value in host.items()}

    def device(name: str, parts: dict[str, float], problems: tuple[str, ...] = ()) -> Phase:
        if hw.unified:
            parts = {k: v if k.startswith("engine") else v * job.per_node for k, v in parts.items()}
        parts = {name: value for name, value in parts.items() if value}
        live = tuple(name for name in parts if not name.startswith("engine"))
        ours = sum(parts[name] for name in live)
        every = {**parts, "fragmentation": assumed.fragmentation * ours, **fixed}
        if name in ("rollout", "weight sync"):
            every.pop(f"host: {ASLEEP}", None)  # freed when the engine wakes
        return Phase(name, "device", {k: v for k, v in every.items() if v}, hw.memory, problems, live)

    every_phase = [
        device("rollout", {**resident, **beside, "engine": runner.share}, runner.problems),
        device("weight sync", {**resident, **beside, **_sync(shape, job, runner, weights)}),
    ]
    forward = {"weights": 0.0 if on_host else weights, "optimizer": resident["optimizer"]}
    answers = branch_tokens(job, assumed)
    passing = log_prob_parts(shape, job, tokens=job.log_prob_tokens + answers, answers=answers)
    every_phase.append(device("log-prob", {**forward, **beside, **passing, **asleep}))
    if job.reference and not job.lora_rank:
        # verl keeps the reference on the host and moves its layers to the device one by one.
        passing = log_prob_parts(shape, job, tokens=job.log_prob_tokens, entropy=False)
        every_phase.append(device("reference", {**resident, **beside, **passing, **asleep}))
    for moment, parts in update_parts(shape, job).items():
        off_device = ("weights", "optimizer", "gradients", "temporaries") if on_host else ()
        parts = {k: v for k, v in parts.items() if k not in off_device}
        every_phase.append(device(f"update: {moment}", {**parts, **beside, **asleep}))
    if job.probes:
        parts = {**probe_parts(shape, job), "optimizer": resident["optimizer"]}
        if offloaded and not job.offload_optimizer:
            parts.pop(KEPT)
        every_phase.append(device("entropy probe", {**parts, **asleep}))
    # The moment after the rollout: the engine sleeps, and the actor has its state and computes nothing.
    every_phase.append(device("asleep", {**resident, **beside, **asleep}))
    if not hw.unified:
        every_phase.append(Phase("host", "host", host, hw.host_memory))
    return every_phase


def _sync(shape: ModelShape, job: Job, runner: EngineMemory, weights: float) -> dict[str, float]:
    """Weights are sent in buckets of whole tensors; an adapter is collected from the module on the device."""
    parts = {"engine weights": runner.weights if job.sleeps else runner.share}
    if job.lora_rank and not job.stays_on_host:
        parts["weights"] = weights
    largest = shape.embedding * job.weight_bytes
    parts["bucket"] = min(job.bucket_bytes, shape.parameters * job.weight_bytes) + largest
    return parts


def _asleep(job: Job, runner: EngineMemory, assumed: Assumptions) -> dict[str, float]:
    """What the engine holds on the device while the actor works. Sleep does not free CUDA graphs."""
    if not engine_named(job.engine).reserves:
        return {"engine asleep": runner.weights}
    if not job.sleeps:
        return {"engine asleep": runner.share}
    graphs = job.graphs * assumed.cuda_graph_mib * 2**20
    return {"engine asleep": assumed.engine_asleep_gib * GIB, "engine asleep: CUDA graphs": graphs}


def host_parts(
    shape: ModelShape, job: Job, hw: Hardware, assumed: Assumptions, *, index: float
) -> dict[str, float]:
    """Host memory of the node that has the index. On unified memory all ranks share it with the device."""
    per_node, held = job.per_node, state(shape, job)
    parts = {"processes": assumed.host_gib * GIB, "index": index}
    if job.offload_weights or job.stays_on_host:
        parts["offloaded weights"] = held["weights"] * per_node
    if job.offload_optimizer or job.stays_on_host:
        parts["offloaded optimizer"] = held["optimizer"] * per_node
    if job.offload_weights or job.stays_on_host:
        parts[KEPT] = kept_parameters(shape, job) * per_node
    if job.stays_on_host:
        parts["offloaded gradients"] = held["gradients"] * per_node
    if job.reference and not job.lora_rank:
        parts["reference model"] = shape.parameters * job.reference_bytes / job.shards * per_node
    if job.lora_rank and job.sleeps and engine_named(job.engine).reserves:
        # With an adapter the engine sleeps at level 1, which keeps its weights in the host's memory.
        parts[ASLEEP] = shape.parameters * job.engine_bytes * per_node / job.tensor_parallel
    if not hw.unified:
        # While loading, every rank of the node holds tied weights; untied weights only the first rank.
        parts["loading"] = shape.parameters * job.weight_bytes * (per_node if shape.tied else 1)
    return {name: value for name, value in parts.items() if value}
