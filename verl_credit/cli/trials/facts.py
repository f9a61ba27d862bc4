"""Collects a trial's facts before its first step, and writes the notes of its row."""

from __future__ import annotations

import hashlib
import json
import shlex
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

import verl_credit
from verl_credit.errors import one_line
from verl_credit.names import ADV_ESTIMATOR
from verl_credit.recipe.machine import GIB, Facts
from verl_credit.records.run.state import deciding_keys
from verl_credit.records.run.versions import code_version, installed_versions
from verl_credit.redact import redact


def store_folder(config: DictConfig) -> Path:
    """``lineage.dir``, or `lineage` beside the run's folder."""
    if config.lineage.dir:
        return Path(config.lineage.dir).expanduser().resolve()
    return Path(config.run_dir).expanduser().resolve().parent / "lineage"


def kept_when(config: DictConfig, best: str = "the best one kept") -> str:
    """Describes the rule by which this run's trial is kept."""
    metric = config.lineage.metric or "held-out exact match"
    way = "falls" if config.lineage.lower_is_better else "gains"
    return f"kept when {metric} {way} by more than {config.lineage.threshold:g} over {best}"


def at_start(config: DictConfig, command: str) -> dict[str, Any]:
    """Returns the facts before anything heavy starts. ``config_sha256`` hashes every key that can change a step's numbers,
    the seed included: equal hashes mean equal computations."""
    deciding = json.dumps(deciding_keys(config), sort_keys=True)
    return {
        "command": command,
        "overrides": [word for word in shlex.split(command) if "=" in word],
        "config_sha256": hashlib.sha256(deciding.encode()).hexdigest(),
        "seeds": {"seed": config.seed, "world_seed": OmegaConf.select(config, "lab.world_seed")},
        "code": code_version(Path(verl_credit.__file__).parent),
        "versions": installed_versions(),
    }


def hardware(facts: Facts) -> dict[str, Any]:
    devices = [{"name": one.name, "memory_gib": round(one.total / GIB, 1)} for one in facts.devices]
    return {"devices": devices, "cpus": facts.cpus, "memory_gib": round(facts.memory.total / GIB, 1)}


def specialist(config: DictConfig) -> str:
    """Names the preset, the method that assigns credit to turns, or verl's estimator."""
    algorithm = config.algorithm
    turns = (
        algorithm.info_gain_norm_mode if algorithm.adv_estimator == ADV_ESTIMATOR else algorithm.adv_estimator
    )
    return str(config.credit_preset or turns)


def notes(config: DictConfig, steps: dict[str, Any], planned: int | None, why: str) -> str:
    """Writes the last column: alpha, gamma, clip scale, steps, and the reason for the status."""
    algorithm = config.algorithm
    scale = [steps[f"clip_scale_{one}"] for one in ("mean", "std")]
    scales = " ".join("—" if one is None else f"{one:.4g}" for one in scale)
    done = f"{steps['steps']}" + (f" of {planned}" if planned else "")
    text = f"alpha={algorithm.adv_rescale_alpha:g} gamma={algorithm.gamma:g} clip scale mean and std {scales}, {done} steps"
    return redact(f"{text}; {one_line(why)[:1000]}" if why else text)
