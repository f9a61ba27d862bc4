"""One training step of every recipe that fits: peaks and seconds of its phases against `verl-credit plan`.

The plan is made twice: before the step for the unchanged recipe, to see whether it fits, and after it with the measured row
lengths. From the run: torch's peak in the actor's process, the peak of the whole device by nvidia-smi, and verl's clocks.
"""

from __future__ import annotations

from gpu import runs
from gpu.record import about, at_most, within_factor
from gpu.world import model_folder, world

SOURCE = "verl-credit plan"
# max_hours, which the Spark's recipe sets, is refused where nothing is saved.
ONE_STEP = ("trainer.total_training_steps=1", "trainer.save_freq=-1", "max_hours=null")
LONGEST_S = 1200
GENERATION = ("prefill", "decode", "search")
CLOCKS = {
    "gen": GENERATION,
    "old_log_prob": ("log-prob", "branches", "branches: kernels"),
    "update_actor": ("update",),
}


def run(setting, record) -> None:
    with world(setting) as here:
        for recipe, overrides in runs.recipes(setting).items():
            if record.has(f"{recipe}: step"):
                continue
            if recipe in runs.TWINS:
                record.not_run(
                    f"{recipe}: step", f"the same configuration as {runs.TWINS[recipe]}, with other questions"
                )
                continue
            try:
                _recipe(setting, record, here, recipe, overrides)
            except RuntimeError as error:
                record.off(f"{recipe}: step", error)


def _recipe(setting, record, here, recipe: str, overrides: list[str]) -> None:
    # The weights that are given, or so small that they are soon made; else the recipe's own name, before they are made.
    light = setting.model or setting.tiny
    model = model_folder(setting, runs.named_model(recipe)) if light else None
    sized = [f"plan.model={model}"] if light else []
    before = runs.plan(recipe, [*overrides, *sized])
    if not before["fits"]:
        record.not_run(f"{recipe}: step", f"it does not fit by the plan: {_worst(before)}")
        return
    if (planned := before["step"]["total_seconds"]) > LONGEST_S:
        record.not_run(f"{recipe}: step", f"by the plan a step takes {planned:.0f} s, above {LONGEST_S}")
        return
    model = model or model_folder(setting, runs.named_model(recipe))
    full = [] if setting.model else runs.FULL_ROWS
    given = [*overrides, *here.overrides(recipe, model), *ONE_STEP, *full]
    with runs.device_peak() as device:
        run_dir, _ = runs.train(setting, recipe, recipe, given)
    step = runs.metrics(run_dir)[0]
    after = runs.plan(recipe, [*given, *_lengths(step)])
    policy = "given weights" if setting.model else "random weights"
    policy += ", credit=grpo, a coin's reward" if here.tossed(recipe) else ""
    toy = setting.device == "cpu"
    record.add(f"{recipe}: memory", *_memory(step, device, after, toy), SOURCE)
    seconds, predicted = _seconds(step, after)
    record.add(f"{recipe}: step", {"policy": policy, **seconds}, {} if toy else predicted, SOURCE)


def _worst(plan: dict) -> str:
    phase = max((p for p in plan["phases"] if not p["fits"]), key=lambda p: p["total"] - p["capacity"])
    problems = f", {phase['problems'][0]}" if phase["problems"] else ""
    return f"{phase['name']} {phase['total'] / 2**30:.1f} of {phase['capacity'] / 2**30:.1f} GiB{problems}"


def _lengths(step: dict) -> list[str]:
    """The plan's assumptions about rows, set to the measured lengths."""
    prompt, response = step["prompt_length/mean"], step["response_length/mean"]
    return [f"plan.mean_prompt_tokens={prompt:.0f}", f"plan.mean_response_tokens={response:.0f}"]


def _memory(step: dict, device: list[int], plan: dict, toy: bool) -> tuple[dict, dict]:
    phases = [phase for phase in plan["phases"] if phase["where"] == "device"]
    live = [phase["live_bytes"] for phase in phases if phase["name"].startswith(("log-prob", "update"))]
    found = {"actor_gib": _first(step, "perf/max_memory_allocated_gb")}
    predicted = {"actor_gib": about(max(live) / 2**30, 0.2)}
    if toy:
        return {"actor_resident_gib": found["actor_gib"], "planned_tensors_gib": max(live) / 2**30}, {}
    if device:
        found["device_gib"] = device[0] / 1024
        predicted["device_gib"] = at_most(max(phase["total"] for phase in phases) / 2**30)
    else:
        found["device_gib"] = "not available: nvidia-smi does not say"
    return found, predicted


def _seconds(step: dict, plan: dict) -> tuple[dict, dict]:
    planned = plan["step"]["seconds"]
    found = {name: _first(step, f"timing_s/{name}") for name in CLOCKS}
    predicted = {
        name: within_factor(sum(planned.get(key, 0.0) for key in keys), 2) for name, keys in CLOCKS.items()
    }
    return found, predicted


def _first(step: dict, name: str) -> float | None:
    """The metric under its name, or under one with a prefix (actor/...)."""
    return next((value for key, value in step.items() if key == name or key.endswith(f"/{name}")), None)
