"""`verl-credit probe --checkpoint RUN/checkpoints/global_step_N`: does one update change the entropy as first order says?

The update of a saved step is measured on rollouts of its policy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from verl_credit.cli.command import RunOverrides, ends
from verl_credit.cli.saved_run import SavedStep, saved_step
from verl_credit.errors import ConfigError, ExitCode
from verl_credit.records.run.files import plain, write_text
from verl_credit.records.run.progress_line import Throttled, say_at_once

if TYPE_CHECKING:  # these import torch, which --help does without
    from verl_credit.study.probe.file import ProbeSettings
    from verl_credit.study.probe.kept_rollouts import RolloutFacts, Rollouts

RESULT = "probe.json"


@ends("probe", ValueError, OSError, failed={RuntimeError: ExitCode.FAILED})
def probe(
    checkpoint: Annotated[Path, Option(help="RUN/checkpoints/global_step_N")],
    config: Annotated[Path | None, Option(help="the probe's file (docs/probe.md)")] = None,
    out: Annotated[Path | None, Option(help="probes/RUN-step-N beside the run if not given")] = None,
    overrides: RunOverrides = (),
) -> None:
    """Exit code 1 where the trainer's step or the measurement fails; nothing is written then."""
    from verl_credit.recipe.doctor.network import ray_on_loopback

    ray_on_loopback(os.environ)  # before Ray is imported
    from verl_credit.config.keys.section import declared
    from verl_credit.recipe.recipe_files import read_tree
    from verl_credit.study.probe.file import ProbeSettings

    settings = declared(ProbeSettings, {} if config is None else read_tree(config), str(config))
    saved = saved_step(checkpoint)
    folder = out or saved.run_dir.parent / "probes" / f"{saved.run_dir.name}-step-{saved.step}"
    if (batch := settings.batch_config).B_U is None:  # the run makes an update of ppo_mini_batch_size prompts
        prompts = int(saved.config.actor_rollout_ref.actor.ppo_mini_batch_size)
        settings = settings.model_copy(update={"batch_config": batch.model_copy(update={"B_U": prompts})})
    path = rollout_file(saved, folder, settings, overrides)
    result = run(saved, path, settings, say=Throttled(say_at_once, "probe"))
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / RESULT, json.dumps(plain(result), indent=1, allow_nan=False) + "\n")
    print("\n".join(summary(result)))
    print(folder / RESULT)


def run(saved: SavedStep, path: Path, settings: ProbeSettings, say) -> dict[str, Any]:
    """Probes a checkpoint on the rollouts in ``path``."""
    import torch

    from verl_credit.study.probe.checkpoint import build_model, read_checkpoint
    from verl_credit.study.probe.kept_rollouts import read_rollouts
    from verl_credit.study.probe.measure import Probe
    from verl_credit.study.probe.policy import Sampling

    rollouts, facts = read_rollouts(path)
    _check_facts(saved, path, facts)
    e, u = divide(rollouts, settings)
    checkpoint, runtime = read_checkpoint(saved.folder), settings.runtime
    notes = _notes(facts, str(checkpoint.stored_dtype).removeprefix("torch."), runtime.dtype)
    for note in notes:
        print(f"probe: {note}")
    dtype, device = getattr(torch, runtime.dtype), torch.device(runtime.device)
    measured = Probe(
        model=build_model(saved.folder, checkpoint.parameters, dtype, device),
        e=e,
        u=u,
        sampling=Sampling(float(facts.temperature), float(facts.top_p)),
        optimizer=checkpoint.optimizer,
        objective=facts.objective,
        tokens=int(saved.config.actor_rollout_ref.rollout.response_length),
        settings=settings,
        say=say,
    ).measure()
    about = {"checkpoint": str(saved.folder), "step": saved.step, "rollouts": str(path), "notes": notes}
    return about | measured


def divide(rollouts: Rollouts, settings: ProbeSettings) -> tuple[Rollouts, Rollouts]:
    """Returns (E, U), different prompts drawn without replacement with ``batch_config.seed``."""
    import torch

    wanted, prompts = settings.batch_config, rollouts.prompts
    if len(prompts) < (both := wanted.B_E + wanted.B_U):
        need = f"batch_config.B_E={wanted.B_E} and batch_config.B_U={wanted.B_U} need {both} prompts"
        has = f"there are rollouts of {len(prompts)}"
        raise ConfigError(f"{need}, and {has}; ask for fewer, or give another --out")
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(wanted.seed)).tolist()
    u, e = order[: wanted.B_U], order[wanted.B_U : both]
    return rollouts.of_prompts([prompts[i] for i in e]), rollouts.of_prompts([prompts[i] for i in u])


def rollout_file(saved: SavedStep, folder: Path, settings: ProbeSettings, overrides: Sequence[str]) -> Path:
    from verl_credit.cli.another_run import collect
    from verl_credit.records.run.table_files import ROLLOUTS, table_path

    def refuse_overrides(why: str) -> None:
        if overrides:
            raise ConfigError(f"{' '.join(overrides)}: overrides are for new rollouts, and {why}")

    if settings.generation.source == "stored":
        refuse_overrides("generation.source=stored samples nothing")
        path = table_path(saved.run_dir, ROLLOUTS, saved.step + 1)
        if not path.exists():
            use = "train with keep_rollouts={steps: N, groups: null}, or use source=run"
            raise ConfigError(f"generation.source=stored: {path} does not exist; {use}")
        return path
    there = folder / "rollouts"
    earlier = table_path(there, ROLLOUTS, saved.step + 1)
    if earlier.exists():
        refuse_overrides(f"{earlier} is there; give another --out for other rollouts")
        if (there / "from" / saved.folder.name / "actor").resolve() != (saved.folder / "actor").resolve():
            raise ConfigError(f"{earlier}: of another run's step {saved.step}; give another --out")
        print(f"probe: rollouts of an earlier probe, {earlier}")
        return earlier
    prompts = settings.batch_config.B_E + settings.batch_config.B_U
    print(f"probe: verl's trainer samples rollouts of {prompts} prompts; its output is in {there}")
    return collect(saved.folder, there, prompts=prompts, overrides=overrides)


def _check_facts(saved: SavedStep, path: Path, facts: RolloutFacts) -> None:
    if facts.policy_step != saved.step:
        raise ConfigError(f"{path}: written by the policy of step {facts.policy_step}, not {saved.step}")
    if facts.top_k not in (-1, 0):
        raise ConfigError(f"{path}: sampled with top_k={facts.top_k}, expected -1")
    if facts.temperature == 0:
        raise ConfigError(f"{path}: sampled greedily (temperature=0), which has no entropy to change")


def _notes(facts: RolloutFacts, stored: str, used: str) -> list[str]:
    """Names the parts of the run's update that Y leaves out, and weights that are ``stored`` in half precision."""
    o, epochs = facts.objective, int(facts.objective["ppo_epochs"])
    kl, entropy = o["kl_loss_coef"], o["entropy_coeff"]
    half = f"weights are {stored}, to which training rounds every step, and are computed with in {used} here"
    notes = {
        f"Y leaves out the KL term of the loss (kl_loss_coef={kl})": o["use_kl_loss"] and kl,
        f"Y leaves out the entropy bonus of the loss (entropy_coeff={entropy})": entropy,
        "Y leaves out the importance weights of rollout correction": facts.rollout_is_weight_B_T is not None,
        f"Y is the first of ppo_epochs={epochs} passes over the rollouts": epochs > 1,
        half: stored in ("bfloat16", "float16"),
    }
    return [note for note, applies in notes.items() if applies]


def summary(result: dict[str, Any]) -> list[str]:
    """The result in a few lines."""
    d, e, u = result["delta_h1"], result["e"], result["u"]
    low, high = d["interval_95"]
    lines = [
        f"entropy {result['entropy']:.4g} ({result['unit']}), E {e['prompts']} prompts, {e['rollouts']} rollouts; "
        f"U {u['prompts']} prompts, {u['rollouts']} rollouts",
        f"δH₁ at the learning rate {result['lr']:g}: {d['value']:+.4g}, 95 % {low:+.4g} to {high:+.4g}; by gradients "
        f"{d['by_dot_product']:+.4g}",
    ]
    for row in result["truth"]:
        change, predicted = f"{row['change']:+.4g} ± {row['se']:.2g}", f"predicted {row['predicted']:+.4g}"
        clipped = f", {100 * row['clipped']:.1f} % of the weights clipped" if row["clipped"] else ""
        lines.append(
            f"ΔH at {row['eta']:.3g}: {change}, {predicted}; effective rollouts {row['ess']:.0f}{clipped}"
        )
    if result["log_log_slope"] is not None:
        lines.append(f"log |ΔH| grows with log η by {result['log_log_slope']:.3f} (1: linear)")
    n = result["norms"]
    x = f"X {n['x']:.3g} (score term {n['x_score']:.3g}, pathwise term {n['x_pathwise']:.3g})"
    off = f"derivatives are off by {result['derivative_check']:.1g}"
    return [*lines, f"norms: {x}, gradient of the loss {n['y_gradient']:.3g}; {off}"]
