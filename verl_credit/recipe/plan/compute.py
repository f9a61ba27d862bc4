"""Predicts tokens, FLOPs, seconds and disk of a step and of a run, under stated assumptions."""

from __future__ import annotations

from dataclasses import dataclass, replace

from verl_credit.recipe.plan.assumptions import Assumptions
from verl_credit.recipe.plan.hardware import GB, Hardware
from verl_credit.recipe.plan.job import Job
from verl_credit.recipe.plan.memory import EngineMemory
from verl_credit.recipe.plan.model_shape import ModelShape
from verl_credit.recipe.plan.update_memory import trained
from verl_credit.records.run.files import count_kept, count_written

GAIN_BYTES = 16
"""Of a token, through the store, for a gain: its id, masks, turn, clip scale (evidence/information_gain)."""


@dataclass(frozen=True)
class Step:
    """The cost of a training step over all devices."""

    tokens: dict[str, float]
    flops: dict[str, float]
    seconds: dict[str, float]

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())


def forward_flops(shape: ModelShape, length: float, *, head: bool = True) -> float:
    """FLOPs of one row: 2 per weight and token, plus 4 per attended pair of tokens, layer and query number.

    The pairs (scores and values, causal) are L² / 2.
    """
    weights = shape.matmul_per_token if head else shape.layer_matmul_per_token
    return 2.0 * weights * length + 2.0 * shape.q_width * shape.layers * length**2


def update_flops(shape: ModelShape, job: Job, length: float) -> float:
    """FLOPs of one row: forward, backward (twice the forward; once with an adapter), and recomputed layers."""
    forward = forward_flops(shape, length)
    backward = forward * (1 if job.lora_rank else 2)
    again = forward_flops(shape, length, head=False) if job.checkpointing else 0.0
    return forward + backward + again


def step(shape: ModelShape, job: Job, hw: Hardware, assumed: Assumptions, runner: EngineMemory) -> Step:
    """Predicts a step: rollouts, log-probs with their branches, the reference's log-probs, the update.

    Prefill reads every token once (a turn's prefix is cached); decoding is bound by memory bandwidth.
    """
    row, generated = assumed.row_tokens, assumed.generated_tokens
    answers = (assumed.mean_turns + 1) * assumed.branch_tokens if job.branches else 0.0
    forward = forward_flops(shape, row)
    flops = {
        "prefill": job.rows * forward_flops(shape, row - generated, head=False),
        "decode": job.rows * generated * 2.0 * shape.matmul_per_token,
        "log-prob": job.rows * forward,
    }
    if answers:
        # A branch is a few tokens, each against its row's keys.
        attended = 4.0 * shape.q_width * shape.layers * row
        flops["branches"] = job.rows * answers * (2.0 * shape.matmul_per_token + attended)
    if job.reference:
        flops["reference"] = job.rows * forward
    flops["update"] = job.rows * job.epochs * update_flops(shape, job, row)

    seconds = {name: value / _speed(job, hw, assumed) for name, value in flops.items() if name != "decode"}
    seconds |= rollout_seconds(shape, job, hw, assumed, runner)
    if answers:
        seconds["branches: kernels"] = assumed.branch_kernel_share * seconds["log-prob"]
        contexts = job.rows * (assumed.mean_turns + 1)
        seconds["branches: driver"] = contexts * assumed.gain_driver_ms / 1000
        seconds["branches: store"] = job.rows * row * GAIN_BYTES / (assumed.gain_store_gb_s * GB)
    tokens = {
        "rows": float(job.rows),
        "per row": row,
        "generated": job.rows * generated,
        "trained": job.rows * row * job.epochs,
        "branches": job.rows * answers,
    }
    seconds["overhead"] = assumed.step_overhead_seconds
    return Step(tokens, flops, {name: value for name, value in seconds.items() if value})


def rollout_seconds(
    shape: ModelShape, job: Job, hw: Hardware, assumed: Assumptions, runner: EngineMemory
) -> dict[str, float]:
    """Seconds of prefill, decode and search of ``job.rows`` rows.

    Search: queries x core-seconds / cores of the index's node, plus each turn's latency.
    """
    read = assumed.row_tokens - assumed.generated_tokens
    by_part = {
        "prefill": job.rows * forward_flops(shape, read, head=False) / _speed(job, hw, assumed),
        "decode": decode_seconds(shape, job, hw, assumed, runner),
    }
    if job.searches:
        computing = job.rows * assumed.search_core_seconds / assumed.host_cores
        by_part["search"] = (assumed.mean_turns - 1) * (assumed.search_seconds + computing)
    return by_part


def _speed(job: Job, hw: Hardware, assumed: Assumptions) -> float:
    """FLOP per second of all devices in training."""
    peak = hw.peak_fp32 if job.compute_bytes == 4 else hw.peak_bf16
    devices = 1 if hw.device == "cpu" else job.devices  # the ranks of a CPU share its cores
    return peak * assumed.mfu * devices


def decode_seconds(
    shape: ModelShape, job: Job, hw: Hardware, assumed: Assumptions, runner: EngineMemory
) -> float:
    """Decoding steps x (the slower of reading weights and caches and of computing, plus a fixed cost).

    A wave, which lasts as long as its longest row, has as many rows as one engine's cache can hold, at most
    ``max_num_seqs``; `hf` counts every row at its full length.
    """
    row = assumed.row_tokens
    rows = max(1.0, job.rows / max(1, job.devices // job.tensor_parallel))
    together = max(1.0, min(rows, job.max_seqs, runner.kv_tokens / row if row else rows))
    waves = rows / together
    reading = runner.weights + together * row / 2 * runner.kv_per_token
    peak = hw.peak_fp32 if job.engine_bytes == 4 else hw.peak_bf16
    computing = together * 2.0 * shape.matmul_per_token / (job.tensor_parallel * peak * assumed.mfu)
    one = max(reading / (hw.bandwidth * assumed.decode_efficiency), computing)
    steps = assumed.mean_generated_tokens * max(1.0, waves - 1 + assumed.longest_over_mean)
    return steps * (one + assumed.decode_overhead_ms / 1000)


def run_steps(job: Job, assumed: Assumptions) -> int | None:
    """``trainer.total_training_steps``, or passes over ``plan.train_rows``; None when neither is known."""
    if job.steps:
        return int(job.steps)
    return int(assumed.train_rows // job.prompts) * job.passes if assumed.train_rows else None


def checkpoint_bytes(shape: ModelShape, job: Job) -> float:
    """A checkpoint has all weights in their stored dtype, and both moments of the trained weights."""
    adapters = trained(shape, job) if job.lora_rank else 0
    return (shape.parameters + adapters + 2 * trained(shape, job)) * job.weight_bytes


def disk_bytes(shape: ModelShape, job: Job, steps: int | None) -> float | None:
    """Bytes of all checkpoints on disk at a time: the kept ones and the one being written. None when unknown."""
    most = None if job.keep is None else job.keep + 1
    count = count_kept(steps, job.save_every, most, job.named)
    return None if count is None else count * checkpoint_bytes(shape, job)


@dataclass(frozen=True)
class RunTime:
    """The seconds of ``steps`` steps. ``evaluation`` is None, and not counted, without a number of held-out questions."""

    steps: int
    training: float
    evaluations: int
    evaluation: float | None
    saves: int
    save: float

    @property
    def total(self) -> float:
        return self.training + self.evaluations * (self.evaluation or 0.0) + self.saves * self.save


def run_time(
    shape: ModelShape,
    job: Job,
    hw: Hardware,
    assumed: Assumptions,
    runner: EngineMemory,
    steps: int,
    step_seconds: float,
) -> RunTime:
    """An evaluation generates once per question and mode, and in the mode "sampled" once per sample. verl also evaluates and
    saves at the last step."""
    questions = job.val_rows or int(assumed.val_rows)
    evaluation = None
    if questions:
        samples = [1 if mode == "greedy" else job.val_samples for mode in job.val_modes]
        asked = [replace(job, prompts=questions * number, rollouts=1) for number in samples]
        evaluation = sum(sum(rollout_seconds(shape, one, hw, assumed, runner).values()) for one in asked)
    return RunTime(
        steps=steps,
        training=steps * step_seconds,
        evaluations=job.val_first + (-(-steps // job.test_every) if job.test_every > 0 else 0),
        evaluation=evaluation,
        saves=count_written(steps, job.save_every, job.named),
        save=checkpoint_bytes(shape, job) / (assumed.disk_gb_s * GB),
    )
