"""What a run's files say beside the predictions: steps, seconds, gains and their price, memory, MFU, k3, resume."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from gpu.half_hour.order import Run
from gpu.half_hour.world import SINGLE_TURN
from gpu.record import Record, about, at_least, at_most, same, within_factor
from verl_credit.records.run.events import STAGE, START
from verl_credit.records.run.files import EVENTS, METRICS, read_json_lines

GIB = 2**30
MEMORY = 0.1  # of the plan's number, to both sides
K3 = 0.01  # r - 1 - log r of a token's ratio r, in the mean; half its squared log
GENERATION = ("prefill", "decode", "search")
CLOCKS = {
    "gen": GENERATION,
    "old_log_prob": ("log-prob", "branches", "branches: kernels"),
    "update_actor": ("update",),
}
PRICE = 1.25  # of a forward without gains: evidence/information_gain/README.md
PLAN, QUEUE, GAINS, LORA, RESUME = (
    "verl-credit plan", "evidence/gpu/half_hour/order.py", "evidence/information_gain/README.md",
    "assumed: engine and trainer differ by less than 0.15 nats a token in bf16", "tests/e2e/test_e2e_lab.py",
)  # fmt: skip


def measure(
    record: Record, run: Run, state: Mapping, run_dir: Path, plan: Mapping, samples: Path, *, toy: bool
) -> dict:
    """Adds the run's rows; returns the numbers of its line in the table. ``toy``: predict no cost."""
    metrics = read_json_lines(run_dir / METRICS)
    steps = _numbers(row["step"] for row in metrics)
    expected = {"steps": same(_numbers(range(1, run.steps + 1)))}
    record.add(f"{run.name}: run", {"steps": steps}, expected, QUEUE, why=state["why"])
    if stages := _stages(run_dir):
        record.add(f"{run.name}: seconds to a stage", stages)
    metrics = metrics[state["before"] :]
    if not metrics:
        return {}
    numbers = {"step_s": _first(metrics[-1], "timing_s/step")}
    for step in metrics:
        _clocks(record, run, step, {} if toy or step is not metrics[-1] else plan["step"]["seconds"])
    if run.recipe != SINGLE_TURN:
        numbers |= _gains(record, run, metrics, toy)
    numbers |= _memory(record, run, metrics[-1], plan, samples, toy)
    numbers |= _mfu(record, run, metrics[-1], plan, toy)
    if run.recipe == SINGLE_TURN and not run.resumes:
        numbers |= _k3(record, run, metrics[-1])
    if run.resumes:
        numbers |= _resume(record, run, state["resume"])
    return numbers


def _numbers(steps: Iterable[int]) -> str:
    return ", ".join(map(str, steps))


def _clocks(record: Record, run: Run, step: Mapping, planned: Mapping) -> None:
    found = {name: _first(step, f"timing_s/{name}") for name in CLOCKS}
    sums = {name: sum(planned.get(key, 0.0) for key in keys) for name, keys in CLOCKS.items() if planned}
    expected = {name: within_factor(seconds, 2) for name, seconds in sums.items()}
    record.add(f"{run.name}: seconds of step {step['step']}", found, expected, PLAN)


def _gains(record: Record, run: Run, metrics: list[dict], toy: bool) -> dict:
    """The price is a step with gains less one without; the first step, in which kernels are compiled, is left out."""
    scored = [row for row in metrics if row.get("credit/gain/scored")]
    if not scored:
        record.add(f"{run.name}: gains", {"contexts_scored": 0}, {"contexts_scored": at_least(1)}, QUEUE)
        return {}
    last = scored[-1]
    found = {
        "contexts_scored": last.get("credit/gain/contexts_scored"), "gain_std": last.get("credit/gain/std"),
        "clip_scale_std": last.get("credit/clip_scale/std"), "failed_rows": last.get("credit/gain/failed_rows"),
    }  # fmt: skip
    differ = {name: at_least(1e-6) for name in ("gain_std", "clip_scale_std")}
    expected = {"contexts_scored": at_least(1), "failed_rows": at_most(0), **differ}
    record.add(f"{run.name}: gains", found, expected, QUEUE)
    numbers = {"contexts_scored": found["contexts_scored"], "clip_scale_std": found["clip_scale_std"]}
    plain = [row for row in metrics if row not in scored and row["step"] > 1]
    if not plain or last["step"] == 1:
        return numbers
    with_gains, without = (
        {c: _first(row, f"timing_s/{c}") for c in ("step", "old_log_prob")} for row in (last, plain[-1])
    )
    price = {
        "step_s_with_gains": with_gains["step"], "step_s_without": without["step"],
        "price_of_forward_s": with_gains["old_log_prob"] - without["old_log_prob"],
        "forward_ratio": with_gains["old_log_prob"] / without["old_log_prob"],
        "seconds_by_our_clock": last.get("credit/gain/seconds"),
    }  # fmt: skip
    record.add(f"{run.name}: price of gains", price, {} if toy else {"forward_ratio": at_most(PRICE)}, GAINS)
    return numbers | {
        "step_s_with_gains": price["step_s_with_gains"],
        "step_s_without": price["step_s_without"],
    }


def _memory(record: Record, run: Run, step: Mapping, plan: Mapping, samples: Path, toy: bool) -> dict:
    """The most that the actor's tensors took, by verl, and that the device had in use, by nvidia-smi, beside the plan's."""
    phases = [phase for phase in plan["phases"] if phase["where"] == "device"]
    live = [phase["live_bytes"] / GIB for phase in phases if phase["name"] not in ("rollout", "asleep")]
    found = {
        "the actor": (_first(step, "perf/max_memory_allocated_gb"), max(live, default=0.0)),
        "the device": (
            max((row["mib"] / 1024 for row in read_json_lines(samples)), default=None),
            max((phase["total"] / GIB for phase in phases), default=0.0),
        ),
    }
    ratios = {}
    for name, (gib, planned) in found.items():
        if gib is None or toy or not planned:
            record.not_run(f"{run.name}: memory, {name}", "not measured on this device")
            continue
        ratios[name] = gib / planned
        of = {"found_gib": gib, "planned_gib": planned, "ratio": ratios[name]}
        record.add(f"{run.name}: memory, {name}", of, {"found_gib": about(planned, MEMORY)}, PLAN)
    if not ratios:
        return {}
    worst = max(ratios, key=lambda name: abs(ratios[name] - 1))
    return {"farthest_phase": f"{worst} {ratios[worst]:.2f}"}


def _stages(run_dir: Path) -> dict[str, float]:
    """Returns the seconds from the last start of the run to each of its stages."""
    events = read_json_lines(run_dir / EVENTS)
    begin = max((at for at, event in enumerate(events) if event["kind"] == START), default=len(events))
    since = events[begin:]
    return {
        event["text"]: round(event["time"] - since[0]["time"], 1) for event in since if event["kind"] == STAGE
    }


def _mfu(record: Record, run: Run, step: Mapping, plan: Mapping, toy: bool) -> dict:
    """verl's number, and the plan's FLOPs over the update's seconds as a share of the peak."""
    seconds, verl = _first(step, "timing_s/update_actor"), _first(step, "perf/mfu/actor")
    found = {"verl": verl, "assumed": plan["assumptions"]["mfu"]}
    if seconds:
        rate = plan["step"]["flops"]["update"] / seconds
        found |= {"by_plan_flops": rate / plan["hardware"]["peak_bf16"], "update_tflops": rate / 1e12}
    record.add(
        f"{run.name}: MFU", found, {} if toy else {"by_plan_flops": within_factor(found["assumed"], 2)}, PLAN
    )
    return {"mfu": found.get("by_plan_flops"), "verl_mfu": verl}


def _k3(record: Record, run: Run, step: Mapping) -> dict:
    """In the second step the engine samples with the adapter of the first; without it k3 is large."""
    found = {
        "k3": _first(step, "rollout_corr/k3_kl"), "log_ppl_difference": _first(step, "rollout_corr/log_ppl_diff"),
        "moved_by_an_update": _first(step, "actor/ppo_kl"), "grad_norm": _first(step, "actor/grad_norm"),
    }  # fmt: skip
    record.add(f"{run.name}: k3 of step {step['step']}", found, {"k3": at_most(K3)}, LORA)
    return {"k3": found["k3"]}


def _resume(record: Record, run: Run, line: str) -> dict:
    record.add(
        f"{run.name}: resume",
        {"resume": line},
        {"resume": same(f"resume: exact, from step {run.steps - 1}")},
        RESUME,
    )
    return {"resume": line.removeprefix("resume: ")}


def _first(step: Mapping, name: str) -> float | None:
    """The metric under its name, or under one with a prefix (actor/...)."""
    return next((value for key, value in step.items() if key == name or key.endswith(f"/{name}")), None)
