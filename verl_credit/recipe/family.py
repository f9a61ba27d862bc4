"""Decides, checks and describes the keys that depend on the policy's family (`policy/families.py`), from its config.json.

Nothing is fetched here unless ``may_fetch``: `train`, `doctor` and `evaluate` fetch the small file once nothing is missing,
other commands read what is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_credit.config.engines import ENGINE, engine_of
from verl_credit.config.resolved import data, leaves, select
from verl_credit.config.settings import CreditSettings
from verl_credit.errors import ConfigError, PreflightError, show_value
from verl_credit.policy.families import (
    ATTENTION,
    AUTO,
    PACKED,
    SCORER,
    Keys,
    dropouts,
    family_of,
    is_random,
    why_not_decoded,
)
from verl_credit.recipe.model_files import HubError, fetch_config, model_values
from verl_credit.recipe.world import MODEL

OVERRIDE = "actor_rollout_ref.model.override_config"
BYPASS = "algorithm.rollout_correction.bypass_mode"
PROMPT, RESPONSE = "data.max_prompt_length", "data.max_response_length"
MODEL_LEN = "actor_rollout_ref.rollout.max_model_len"
RECURRENT_KERNELS = ("fla", "causal_conv1d", "mamba_ssm")
"""transformers' recurrent layers take these where they are installed. They need a GPU, and were never run."""
EVALUATED = "old_log_probs are computed without it, so that the ratios of an update differ from 1 before its first step"


def policy_values(config: DictConfig, *, may_fetch: bool = False) -> dict[str, Any]:
    """The policy's config.json, changed by `OVERRIDE` as verl changes it; without the file, the overrides alone."""
    path = select(config, "actor_rollout_ref.model.hf_config_path") or select(config, MODEL)
    values = None
    if isinstance(path, str) and path:
        if may_fetch:
            with suppress(HubError):  # the check of the model has the reason
                fetch_config(path)
        with suppress(PreflightError, OSError):  # OSError: no file can have that name
            values = model_values(path)
    changes = data(select(config, OVERRIDE))  # a value in place of the section is refused later
    return _merged(values or {}, changes if isinstance(changes, Mapping) else {})


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    nested = {
        key: _merged(values[key], change)
        for key, change in changes.items()
        if isinstance(change, Mapping) and isinstance(values.get(key), Mapping)
    }
    return {**values, **changes, **nested}


def decide_family(config: DictConfig, values: Mapping[str, Any]) -> None:
    """Decides attention, padding and scorer where they are ``auto``, and sets the model's dropouts to 0."""
    given = {key: select(config, key) for key in (ATTENTION, PACKED, SCORER)}
    chosen = family_of(values).chosen(*given.values(), appends=not select(config, BYPASS))
    for (key, value), decided in zip(given.items(), chosen, strict=True):
        if value == AUTO:
            OmegaConf.update(config, key, decided)
    for key in dropouts(values):
        if select(config, f"{OVERRIDE}.{key}") is None:
            OmegaConf.update(config, f"{OVERRIDE}.{key}", 0.0, force_add=True)


def chosen_scorer(config: DictConfig) -> str:
    """What ``auto`` chooses beside the recipe's attention."""
    family = family_of(policy_values(config))
    return family.chosen(select(config, ATTENTION), appends=not select(config, BYPASS)).scorer


def validate_family(config: DictConfig, settings: CreditSettings) -> Iterator[ConfigError]:
    """Yields refusals of keys with which this family's numbers would be wrong."""
    values = policy_values(config)
    # A dropout is given, or of a config.json that was not here when auto was decided.
    for name, value in dropouts(values).items():
        yield ConfigError(key=f"{OVERRIDE}.{name}", value=value, accepted=f"{EVALUATED}; set it to 0")
    family = family_of(values)
    scorer = settings.algorithm.info_gain_scorer if settings.scores_gain else None
    if fault := family.fault(select(config, ATTENTION), select(config, PACKED), scorer):
        key, use = fault
        beside = {ATTENTION: SCORER if scorer == "branch" else PACKED, PACKED: ATTENTION}.get(key, MODEL)
        yield ConfigError.of(config, key or MODEL, *({beside} - {key or MODEL}), accepted=use)
    if engine_of(config).ours and (why := why_not_decoded(values)):
        yield ConfigError.of(config, ENGINE, MODEL, accepted=why)
    if family.longest is not None:
        yield from _within(config, family.longest, f"{family.name}: {family.why}")


def _within(config: DictConfig, longest: int, why: str) -> Iterator[ConfigError]:
    """Checks that no row and no request passes the length beyond which positions change for the rows beside it."""
    row, engine = select(config, PROMPT) + select(config, RESPONSE), select(config, MODEL_LEN)
    if row > longest:
        use = f"{why}; shorten the rows to {longest} tokens in all, or take another model: no keys make longer rows exact"
        yield ConfigError.of(config, RESPONSE, PROMPT, MODEL, accepted=use)
        return  # max_model_len=auto is the row's length
    unbounded = engine is None and not engine_of(config).ours
    if unbounded or (engine or 0) > longest:
        use = f"{why}, and an engine with that length rotates as for long rows; set it to {longest} or less"
        yield ConfigError.of(config, MODEL_LEN, MODEL, accepted=use)


def family_line(config: DictConfig) -> str:
    """The keys that were chosen or given, and what decides about them, for `explain`, `doctor` and the start."""
    values = policy_values(config)
    family = family_of(values)
    keys = Keys(*(select(config, key) for key in (ATTENTION, PACKED, SCORER)))
    if not family.name:
        unread = f"the config.json of {MODEL}={show_value(select(config, MODEL))} is not on this machine"
        return f"family: {unread}; {keys}, and the proof at the start decides"
    given = leaves(data(select(config, OVERRIDE)) or {})
    off = ", ".join(key for key, value in given if value == 0 and is_random(key, 1))
    zero = f"; {off} of the model set to 0 ({EVALUATED})" if off else ""
    kernels = ", ".join(name for name in RECURRENT_KERNELS if family.mixes and find_spec(name))
    untried = f"; its layers were never run with the installed kernels of {kernels}" if kernels else ""
    return f"family: {family.name}, {keys}: {family.why}{zero}{untried}"
