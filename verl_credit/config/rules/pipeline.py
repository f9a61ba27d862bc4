"""Values and combinations of the outcome and token level's keys, checked before anything heavy starts."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig

from verl_credit.config.keys import CANONICAL, DETECTORS, Algorithm
from verl_credit.credit.outcome.outcome import OUTCOME_OPERATORS
from verl_credit.credit.planning.strategic_grams import parse_grams
from verl_credit.credit.plugins import as_transform_spec, as_uncertainty_spec, load
from verl_credit.credit.token.token_transforms import TRANSFORMS
from verl_credit.credit.token.uncertainty import UNCERTAINTY_KINDS, canonical_kind
from verl_credit.credit.turn.modes import MODES, modes_that
from verl_credit.errors import ConfigError
from verl_credit.names import ADV_ESTIMATOR


def validate_pipeline(config: DictConfig, settings: Algorithm) -> None:
    """Raise ConfigError for the first combination that is wrong; each value by itself has been checked."""
    mode = settings.info_gain_norm_mode
    _only_with_our_estimator(config, settings)
    _named("algorithm.advantage_mode", settings.advantage_mode, OUTCOME_OPERATORS, _load_outcome)
    _named(
        "algorithm.transform_mode", settings.transform_mode, (*TRANSFORMS, *CANONICAL), _load_transform(mode)
    )
    _named("algorithm.uncertainty_kind", settings.uncertainty_kind, UNCERTAINTY_KINDS, _load_uncertainty)
    if settings.algorithm_mode:
        _load("algorithm.algorithm_mode", settings.algorithm_mode)
        _replaces_everything(settings, mode)
    _outcome_level(config, settings, mode)
    _token_level(config, settings, mode)
    _planning(settings)


def _only_with_our_estimator(config: DictConfig, settings: Algorithm) -> None:
    if config.algorithm.adv_estimator == ADV_ESTIMATOR:
        return
    for key, value, off in (
        ("advantage_mode", settings.advantage_mode, "grpo"),
        ("transform_mode", settings.transform_mode, "none"),
        ("algorithm_mode", settings.algorithm_mode, None),
    ):
        if value != off:
            raise ConfigError(
                f"algorithm.{key}={value} does nothing with algorithm.adv_estimator={config.algorithm.adv_estimator}: "
                f"set algorithm.adv_estimator={ADV_ESTIMATOR}"
            )


def _replaces_everything(settings: Algorithm, mode: str) -> None:
    for key, value, off in (
        ("advantage_mode", settings.advantage_mode, "grpo"),
        ("transform_mode", settings.transform_mode, "none"),
        ("info_gain_norm_mode", mode, "none"),
    ):
        if value != off:
            raise ConfigError(
                f"algorithm.algorithm_mode={settings.algorithm_mode} replaces the whole pipeline, so that "
                f"algorithm.{key}={value} would do nothing: set it to {off}"
            )


def _outcome_level(config: DictConfig, settings: Algorithm, mode: str) -> None:
    if settings.advantage_mode != "grpo" and not MODES[mode].any_outcome_operator:
        raise ConfigError(
            f"algorithm.advantage_mode={settings.advantage_mode} with algorithm.info_gain_norm_mode={mode}: that mode "
            f"normalises outcomes itself and accepts grpo only; others: {modes_that('any_outcome_operator')}"
        )
    if MODES[mode].every_turn_needs_gain and config.algorithm.info_gain_first_turn != "prior":
        raise ConfigError(
            f"algorithm.info_gain_norm_mode={mode} with algorithm.info_gain_first_turn="
            f"{config.algorithm.info_gain_first_turn}: a turn without a gain would leave its baseline out, and the "
            "mode would be biased after all; set info_gain_first_turn=prior"
        )
    if settings.advantage_mode != "maxrl":
        return
    penalty = config.reward.custom_reward_function.reward_kwargs.get("format_penalty", 0.0)
    if isinstance(penalty, bool) or not isinstance(penalty, int | float) or not math.isfinite(penalty):
        raise ConfigError(
            f"reward.custom_reward_function.reward_kwargs.format_penalty={penalty!r}: expected a number"
        )
    if penalty > 0:
        raise ConfigError(
            f"algorithm.advantage_mode=maxrl divides by the mean outcome, and reward.custom_reward_function."
            f"reward_kwargs.format_penalty={penalty} can make outcomes negative: set it to 0"
        )
    if config.algorithm.use_kl_in_reward:
        raise ConfigError(
            "algorithm.advantage_mode=maxrl divides by the mean outcome, and algorithm.use_kl_in_reward=true can make "
            "outcomes negative: use actor_rollout_ref.actor.use_kl_loss instead"
        )


def _token_level(config: DictConfig, settings: Algorithm, mode: str) -> None:
    transform = TRANSFORMS.get(settings.transform_mode)
    if settings.canonical_transform:
        for key, value, off in (
            ("info_gain_norm_mode", mode, "none"),
            ("advantage_mode", settings.advantage_mode, "grpo"),
        ):
            if value != off:
                raise ConfigError(
                    f"algorithm.transform_mode={settings.transform_mode} shapes rewards itself, so that "
                    f"algorithm.{key}={value} would do nothing: set it to {off}"
                )
        if canonical_kind(settings.uncertainty_kind) != "shannon_entropy":
            raise ConfigError(
                f"algorithm.transform_mode={settings.transform_mode} is defined on the policy's entropy: set "
                f"algorithm.uncertainty_kind=shannon_entropy (it is {settings.uncertainty_kind})"
            )
    correction = config.algorithm.get("rollout_correction") or {}
    if canonical_kind(settings.uncertainty_kind) == "shannon_entropy" and correction.get(
        "bypass_mode", False
    ):
        raise ConfigError(
            "algorithm.uncertainty_kind=shannon_entropy with algorithm.rollout_correction.bypass_mode=true: entropies "
            "come with old_log_probs, which are then not computed; use surprisal or predictive_variance"
        )
    if transform is not None and transform.uses_sepa_controller:
        sepa = settings.sepa
        if sepa.schedule == "linear" and sepa.steps == 0:
            raise ConfigError(
                f"algorithm.sepa.steps=0 keeps SEPA off in algorithm.transform_mode={settings.transform_mode}: "
                "give the steps of its ramp"
            )


def _planning(settings: Algorithm) -> None:
    _named("algorithm.planning.detector", settings.planning.detector, DETECTORS, _load)
    if settings.planning.detector == "anchors":
        folder = settings.planning.model
        if not folder or not (Path(folder).expanduser() / "config.json").exists():
            raise ConfigError(
                f"algorithm.planning.model={folder}: algorithm.planning.detector=anchors needs the folder of a "
                "sentence encoder in Hugging Face format"
            )
    if settings.strategic_grams is not None:
        try:
            parse_grams(settings.strategic_grams)
        except (ValueError, TypeError) as error:
            raise ConfigError(str(error)) from error


def _named(key: str, value: str, names, load_own: Callable[[str, str], object]) -> None:
    """A built-in name, or a dotted path that loads."""
    if value in names or (names is UNCERTAINTY_KINDS and canonical_kind(value) is not None):
        return
    if "." not in str(value) and ":" not in str(value):
        import difflib

        near = difflib.get_close_matches(str(value), names, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ConfigError(
            f"{key}={value!r}{hint}: accepted are {', '.join(names)}, or a dotted path to your own (my_module.my_name)"
        )
    load_own(key, value)


def _load(key: str, value: str) -> object:
    try:
        return load(value, key)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _load_outcome(key: str, value: str) -> object:
    return _load(key, value)


def _load_uncertainty(key: str, value: str) -> object:
    try:
        return as_uncertainty_spec(_load(key, value), value)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _load_transform(mode: str) -> Callable[[str, str], object]:
    def load_own(key: str, value: str) -> object:
        try:
            spec = as_transform_spec(_load(key, value), value)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if spec.compute_context is not None and mode != "none" and not spec.uses_turn_advantages:
            raise ConfigError(
                f"{key}={value} computes token advantages from episode advantages, so that "
                f"algorithm.info_gain_norm_mode={mode} would do nothing: set it to none, or read "
                "context.turn_advantages_G and set uses_turn_advantages = True on the transform"
            )
        return spec

    return load_own
