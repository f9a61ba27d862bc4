"""A plan as text, as one line of a table, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from verl_credit.config.log_prob_path import describe
from verl_credit.recipe.plan.compute import RunTime
from verl_credit.recipe.plan.hardware import GIB
from verl_credit.recipe.plan.plan import Plan


def text(plan: Plan) -> str:
    """The whole plan: phases, steps, assumptions, remedies."""
    hw, job, shape = plan.hardware, plan.job, plan.shape
    assumed = {name: value for name, value in asdict(plan.assumed).items() if value}
    lines = [
        f"{plan.recipe or 'recipe'}: {shape.name}, {shape.parameters:,} parameters, on {job.devices} x {hw.name} "
        f"({hw.memory / GIB:.1f} GiB{' unified' if hw.unified else ''}; {hw.source})",
        *(f"note: {note}" for note in plan.notes),
        "",
        *_phase_lines(plan),
        "",
        *_time_lines(plan),
        "",
        "assumptions (change with plan.NAME=VALUE):",
        *(f"  {n}={value:g}{'' if n in plan.given else ' (assumed)'}" for n, value in assumed.items()),
        "",
        *_verdict(plan),
    ]
    return "\n".join(lines)


def _phase_lines(plan: Plan) -> list[str]:
    rows = [("phase", "GiB", "has", "", "parts (GiB)")]
    for phase in plan.phases:
        parts = sorted(phase.parts.items(), key=lambda item: -item[1])
        largest = ", ".join(f"{name} {value / GIB:.2f}" for name, value in parts if value >= 0.005 * GIB)
        fits = "fits" if phase.fits else "DOES NOT FIT"
        where = phase.name if phase.where == "device" else "host (per node)"
        rows.append((where, f"{phase.total / GIB:.1f}", f"{phase.capacity / GIB:.1f}", fits, largest))
    lines = columns(rows)
    lines += [f"  {phase.name}: {problem}" for phase in plan.phases for problem in phase.problems]
    cache = plan.engine
    lines.append(
        f"KV cache: {cache.kv_per_token:,.0f} bytes a token on a device, room for {cache.kv_tokens:,.0f} tokens "
        f"({cache.kv_tokens / max(1, plan.job.longest_row):.1f} rows of full length)"
    )
    no_flash = "device cpu" if plan.job.device_type == "cpu" else f"no flash-attn on {plan.hardware.name}"
    lines.append(describe(plan.job.log_prob_path, plan.shape.vocabulary, plan.job.device_type, no_flash))
    return lines


def _time_lines(plan: Plan) -> list[str]:
    step = plan.step
    rows = [("per step", "PFLOP", "seconds")]
    for name in dict.fromkeys((*step.flops, *step.seconds)):
        flops = f"{step.flops[name] / 1e15:.4g}" if name in step.flops else ""
        rows.append((name, flops, f"{step.seconds.get(name, 0.0):.1f}"))
    rows.append(("all", f"{sum(step.flops.values()) / 1e15:.4g}", f"{step.total_seconds:.1f}"))
    tokens = step.tokens
    lines = [
        *columns(rows),
        f"tokens per step: {tokens['trained']:,.0f} trained in {tokens['rows']:,.0f} rows of {tokens['per row']:,.0f}, "
        f"{tokens['generated']:,.0f} generated, {tokens['branches']:,.0f} in scored answers",
    ]
    if plan.run is None:
        lines.append("run: length unknown; set trainer.total_training_steps or plan.train_rows")
    else:
        lines.append(f"run: {duration(plan.run.total)}: {_run_parts(plan.run)}")
    disk = "unknown: every checkpoint is kept" if plan.disk is None else f"{plan.disk / 1e9:.1f} GB"
    lines.append(f"disk for checkpoints: {disk}")
    return lines


def _run_parts(run: RunTime) -> str:
    parts = [f"{run.steps:,} steps {duration(run.training)}"]
    if run.evaluations and run.evaluation is None:
        parts.append(
            f"{run.evaluations} evaluations LEFT OUT (data.val_max_samples or plan.val_rows says of how many questions)"
        )
    elif run.evaluations and run.evaluation is not None:
        parts.append(f"{run.evaluations} evaluations {duration(run.evaluations * run.evaluation)}")
    if run.saves:
        parts.append(f"{run.saves} checkpoints {duration(run.saves * run.save)}")
    return ", ".join(parts)


def _verdict(plan: Plan) -> list[str]:
    if plan.fits:
        spare = min(phase.capacity - phase.total for phase in plan.phases) / GIB
        return [f"fits, {spare:.1f} GiB spare in the fullest phase"]
    missing = max(phase.total - phase.capacity for phase in plan.phases) / GIB
    short = f", {missing:.1f} GiB missing in the fullest phase" if missing > 0 else ""
    return [f"does not fit{short}; what needs less, the cheapest first:", *(f"  {one}" for one in plan.remedies),
            "  more devices, more memory, or a smaller model"]  # fmt: skip


def line(plan: Plan) -> tuple[str, ...]:
    """A row of the table of several recipes."""
    run = "?" if plan.run is None else duration(plan.run.total)
    return (
        plan.recipe,
        plan.shape.name.rsplit("/", 1)[-1],
        f"{plan.job.devices} x {plan.hardware.name}",
        f"{plan.peak.total / GIB:.1f} of {plan.peak.capacity / GIB:.1f}",
        plan.peak.name,
        f"{plan.step.total_seconds:.0f}",
        run,
        "?" if plan.disk is None else f"{plan.disk / 1e9:.1f}",
        "fits" if plan.fits else "does not fit",
    )


HEADER = ("recipe", "model", "hardware", "peak GiB", "in", "s/step", "run", "disk GB", "")


def as_json(plan: Plan) -> dict:
    """Plain values; bytes, FLOPs and seconds."""
    return {
        "recipe": plan.recipe,
        "fits": plan.fits,
        "model": {**asdict(plan.shape), "parameters": plan.shape.parameters},
        "hardware": asdict(plan.hardware),
        "devices": plan.job.devices,
        "log_probs": plan.job.log_prob_path,
        "phases": [
            {**asdict(phase), "total": phase.total, "live_bytes": phase.live_bytes, "fits": phase.fits}
            for phase in plan.phases
        ],
        "kv_bytes_per_token": plan.engine.kv_per_token,
        "kv_tokens": plan.engine.kv_tokens,
        "step": {**asdict(plan.step), "total_seconds": plan.step.total_seconds},
        "run": {
            "steps": plan.steps,
            "seconds": None if plan.run is None else plan.run.total,
            "parts": None if plan.run is None else asdict(plan.run),
            "checkpoint_disk_bytes": plan.disk,
        },
        "assumptions": asdict(plan.assumed),
        "given": list(plan.given),
        "remedies": plan.remedies,
        "notes": list(plan.notes),
    }


def duration(seconds: float) -> str:
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 2 * 86400 else f"{seconds / 86400:.1f} days"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
