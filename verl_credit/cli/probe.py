"""`verl-credit probe --checkpoint RUN/checkpoints/global_step_N`: does one update change the entropy as first order says?

The update of a saved step is measured on rollouts of its policy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from verl_credit.cli.command import ends
from verl_credit.cli.saved_run import SavedStep, saved_step
from verl_credit.errors import ConfigError, ExitCode
from verl_credit.records.run.files import plain, write_text
from verl_credit.records.run.progress_line import Throttled, say_at_once

if TYPE_CHECKING:  # these import torch, which --help does without
    import torch

    from verl_credit.study.probe.file import ProbeSettings
    from verl_credit.study.probe.kept_rollouts import RolloutFacts, Rollouts

RESULT, PICTURE = "probe.json", "probe.png"


@ends("probe", ValueError, OSError, failed={RuntimeError: ExitCode.FAILED})
def probe(
    checkpoint: Annotated[Path, Option(help="RUN/checkpoints/global_step_N")],
    config: Annotated[
        Path | None, Option(help="the probe's file (docs/probe.md); defaults where not given")
    ] = None,
    out: Annotated[
        Path | None, Option(help="a folder for the result; probes/RUN-step-N beside the run")
    ] = None,
    overrides: Annotated[
        list[str], Argument(help="Hydra overrides of the run's configuration, for new rollouts")
    ] = (),
) -> None:
    """Exit code 1 where the trainer's step or the measurement fails; nothing is written then."""
    from verl_credit.recipe.doctor.network import ray_on_loopback

    ray_on_loopback(os.environ)  # before Ray is imported
    from verl_credit.config.keys.section import declared
    from verl_credit.recipe.recipe_files import read_tree
    from verl_credit.study.probe.file import ProbeSettings
    from verl_credit.study.probe.picture import picture

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
    (folder / PICTURE).write_bytes(picture(result))
    print("\n".join(summary(result)))
    print(f"{folder / RESULT}\n{folder / PICTURE}")


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
    checkpoint = read_checkpoint(saved.folder)
    notes = [*_left_out(facts), *_rounded(checkpoint.stored_dtype, settings.runtime.dtype)]
    dtype = getattr(torch, settings.runtime.dtype)
    for note in notes:
        print(f"probe: {note}")
    measured = Probe(
        model=build_model(saved.folder, checkpoint.parameters, dtype, torch.device(settings.runtime.device)),
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
        need = f"batch_config.B_E={wanted.B_E} and batch_config.B_U={wanted.B_U} need {both}"
        use = f"there are rollouts of {len(prompts)}; ask for fewer, or give another --out for new rollouts"
        raise ConfigError(f"{need} different prompts, and {use}")
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(wanted.seed)).tolist()
    u, e = order[: wanted.B_U], order[wanted.B_U : both]
    return rollouts.of_prompts([prompts[i] for i in e]), rollouts.of_prompts([prompts[i] for i in u])


def rollout_file(saved: SavedStep, folder: Path, settings: ProbeSettings, overrides: Sequence[str]) -> Path:
    from verl_credit.cli.another_run import collect
    from verl_credit.records.run.table_files import ROLLOUTS, table_path

    if settings.generation.source == "stored":
        _refuse_overrides(overrides, "generation.source=stored samples nothing")
        path = table_path(saved.run_dir, ROLLOUTS, saved.step + 1)
        if not path.exists():
            raise ConfigError(
                f"generation.source=stored: {path} does not exist. The policy of step {saved.step} wrote those of step "
                f"{saved.step + 1}: train with keep_rollouts={{steps: N, groups: null}}, which keeps those of the last N "
                "steps, or use source=run"
            )
        return path
    earlier = table_path(folder / "rollouts", ROLLOUTS, saved.step + 1)
    if earlier.exists():
        _refuse_overrides(overrides, f"{earlier} is there; give another --out for other rollouts")
        actor = folder / "rollouts" / "from" / saved.folder.name / "actor"
        if actor.resolve() != (saved.folder / "actor").resolve():
            raise ConfigError(f"{earlier}: of another run's step {saved.step}; give another --out")
        print(f"probe: rollouts of an earlier probe, {earlier}")
        return earlier
    prompts = settings.batch_config.B_E + settings.batch_config.B_U
    said = f"what it says is in {folder / 'rollouts'}"
    print(f"probe: verl's trainer samples rollouts of {prompts} prompts; {said}")
    return collect(saved.folder, folder / "rollouts", prompts=prompts, overrides=overrides)


def _refuse_overrides(overrides: Sequence[str], why: str) -> None:
    if overrides:
        raise ConfigError(f"{' '.join(overrides)}: overrides are for new rollouts, and {why}")


def _check_facts(saved: SavedStep, path: Path, facts: RolloutFacts) -> None:
    if facts.policy_step != saved.step:
        raise ConfigError(f"{path}: written by the policy of step {facts.policy_step}, not {saved.step}")
    if facts.top_k not in (-1, 0):
        use = "the probe knows temperature and top_p, expected top_k=-1"
        raise ConfigError(f"{path}: sampled with top_k={facts.top_k}; {use}")
    if facts.temperature == 0:
        raise ConfigError(f"{path}: sampled greedily (temperature=0), which has no entropy to change")


def _left_out(facts: RolloutFacts) -> list[str]:
    """Names the parts of the run's update that Y leaves out."""
    o, notes = facts.objective, []
    if o["use_kl_loss"] and o["kl_loss_coef"]:
        notes.append(f"Y leaves out the KL term of the loss (kl_loss_coef={o['kl_loss_coef']})")
    if o["entropy_coeff"]:
        notes.append(f"Y leaves out the entropy bonus of the loss (entropy_coeff={o['entropy_coeff']})")
    if facts.rollout_is_weight_B_T is not None:
        notes.append("Y leaves out the importance weights of rollout correction")
    if (epochs := int(o["ppo_epochs"])) > 1:
        notes.append(f"Y is the first of ppo_epochs={epochs} passes over the rollouts")
    return notes


def _rounded(stored: torch.dtype, used: str) -> list[str]:
    """Names weights stored in half precision, to which training rounds every step."""
    name = str(stored).removeprefix("torch.")
    if name not in ("bfloat16", "float16"):
        return []
    return [
        f"the checkpoint's weights are {name}: here they are computed with in {used}, but training rounds its steps to "
        f"{name}, so its own change of entropy differs"
    ]


def summary(result: dict[str, Any]) -> list[str]:
    """The result in a few lines."""
    d, e, u = result["delta_h1"], result["e"], result["u"]
    lines = [
        f"entropy {result['entropy']:.4g} ({result['unit']}), E {e['prompts']} prompts, {e['rollouts']} rollouts; "
        f"U {u['prompts']} prompts, {u['rollouts']} rollouts",
        f"δH₁ at the learning rate {result['lr']:g}: {d['value']:+.4g}, 95 % {d['interval_95'][0]:+.4g} to "
        f"{d['interval_95'][1]:+.4g}; by gradients {d['by_dot_product']:+.4g}",
    ]
    lines += [
        f"ΔH at {row['eta']:.3g}: {row['change']:+.4g} ± {row['se']:.2g}, predicted {row['predicted']:+.4g}; effective "
        f"rollouts {row['ess']:.0f}"
        + (f", {100 * row['clipped']:.1f} % of the weights clipped" if row["clipped"] else "")
        for row in result["truth"]
    ]
    if result["log_log_slope"] is not None:
        lines.append(f"log |ΔH| grows with log η by {result['log_log_slope']:.3f} (1: linear)")
    n = result["norms"]
    lines.append(
        f"norms: X {n['x']:.3g} (score term {n['x_score']:.3g}, pathwise term {n['x_pathwise']:.3g}), "
        f"gradient of the loss {n['y_gradient']:.3g}; derivatives are off by {result['derivative_check']:.1g}"
    )
    return lines
