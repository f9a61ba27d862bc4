"""Plugin state beside verl's checkpoint, and what a resume can promise."""

from __future__ import annotations

import json
from pathlib import Path

from verl_credit.host.run_files import STATE, write_text
from verl_credit.host.settings import CreditSettings

VERSION = 1


def save_state(folder: Path, config, settings: CreditSettings, step: int) -> None:
    """Written before verl's tracker file, so that a checkpoint that counts has it."""
    state = {"version": VERSION, "step": step, "run": _run_keys(config), "settings": settings.as_dict()}
    write_text(Path(folder) / STATE, json.dumps(state, indent=1))


def describe_resume(config, settings: CreditSettings, step: int) -> str:
    """``resume: exact ...`` or what makes it inexact; raises when the checkpoint is of another step."""
    folder = Path(config.trainer.default_local_dir) / f"global_step_{step}"
    if config.trainer.resume_mode == "resume_path":
        folder = Path(config.trainer.resume_from_path)
    path = folder / STATE
    if not path.exists():
        return f"resume: from step {step}, not exact: {path} is missing (a checkpoint of stock verl?)"
    state = json.loads(path.read_text(encoding="utf-8"))
    if state.get("version") != VERSION or state.get("step") != step:
        raise ValueError(
            f"{path} says version {state.get('version')}, step {state.get('step')}; expected {VERSION}, {step}"
        )
    differences = _differences(state["run"], _run_keys(config)) + _differences(
        state["settings"], settings.as_dict()
    )
    if not (folder / "data.pt").exists():
        differences.append(f"{folder / 'data.pt'} is missing: data order starts again")
    if differences:
        return f"resume: from step {step}, not exact: " + "; ".join(differences)
    return f"resume: exact, from step {step}"


def _run_keys(config) -> dict:
    """What, besides our settings, decides the rest of the run."""
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    return {
        "seed": config.seed,
        "data.train_files": str(config.data.train_files),
        "data.train_batch_size": config.data.train_batch_size,
        "rollout.n": rollout.n,
        "rollout.temperature": rollout.temperature,
        "actor.ppo_mini_batch_size": actor.ppo_mini_batch_size,
        "actor.ppo_epochs": actor.ppo_epochs,
        "actor.optim.lr": actor.optim.lr,
    }


def _differences(before: dict, now: dict) -> list[str]:
    keys = list(dict.fromkeys([*before, *now]))
    return [f"{k} was {before.get(k)!r}, is {now.get(k)!r}" for k in keys if before.get(k) != now.get(k)]
