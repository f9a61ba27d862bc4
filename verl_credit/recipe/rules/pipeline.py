"""Checks values and combinations of the outcome and token level's keys before anything heavy starts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig

from verl_credit.config.keys import CANONICAL, DETECTORS, Algorithm
from verl_credit.config.resolved import select
from verl_credit.config.settings import CreditSettings
from verl_credit.credit.outcome import OUTCOME_OPERATORS
from verl_credit.credit.planning.planning import parse_grams
from verl_credit.credit.plugins import as_transform_spec, as_uncertainty_spec
from verl_credit.credit.token.token_transforms import TRANSFORMS
from verl_credit.credit.token.uncertainty import UNCERTAINTY_KINDS, canonical_kind
from verl_credit.credit.turn.modes import modes_that
from verl_credit.errors import ConfigError
from verl_credit.names import OUR_REWARD
from verl_credit.recipe.rules.own import load_own, try_detector, try_operator
from verl_credit.recipe.rules.refusals import refusals_of

MODE, OUTCOME, TRANSFORM, KIND, ALGORITHM, DETECTOR = (
    f"algorithm.{name}"
    for name in ("info_gain_norm_mode", "advantage_mode", "transform_mode", "uncertainty_kind", "algorithm_mode",
                 "planning.detector")
)  # fmt: skip
REWARD = "reward.custom_reward_function"
PENALTY, REASONING = (f"{REWARD}.reward_kwargs.{name}" for name in ("format_penalty", "include_reasoning"))


def validate_pipeline(config: DictConfig, settings: CreditSettings) -> Iterator[ConfigError]:
    """Yields a refusal for every wrong combination; single values have been checked before."""
    algorithm = settings.algorithm
    kind = algorithm.uncertainty_kind
    kinds = UNCERTAINTY_KINDS if canonical_kind(kind) is None else [kind]
    own = {
        "outcome": (OUTCOME, load_own(OUTCOME, algorithm.advantage_mode, OUTCOME_OPERATORS)),
        "transform": (TRANSFORM, _named_transform(config, algorithm)),
        "uncertainty": (KIND, load_own(KIND, kind, kinds, as_uncertainty_spec)),
    }
    if algorithm.algorithm_mode:
        own["algorithm"] = ALGORITHM, load_own(ALGORITHM, algorithm.algorithm_mode)
        off = {"advantage_mode": "grpo", "transform_mode": "none", "info_gain_norm_mode": "none"}
        yield from _would_do_nothing(config, off, "algorithm_mode", "that replaces the whole pipeline")
    yield from refusals_of(_reward_reads_as_the_loop, config)
    for rule in (_outcome_level, _token_level, _planning):
        yield from refusals_of(rule, config, algorithm)
    for kind, (key, operator) in own.items():
        if operator is not None:
            yield from refusals_of(try_operator, config, algorithm, operator, key, kind)


def _would_do_nothing(config: DictConfig, off: dict[str, str], name: str, why: str) -> Iterator[ConfigError]:
    """Refuses other values than ``off`` for keys that ``algorithm.<name>`` leaves without effect."""
    for key, default in off.items():
        if config.algorithm[key] != default:
            use = f"{why}, so that this key would do nothing; set it to {default}"
            yield ConfigError.of(config, f"algorithm.{key}", f"algorithm.{name}", accepted=use)


def _outcome_level(config: DictConfig, algorithm: Algorithm) -> Iterator[ConfigError]:
    if algorithm.advantage_mode != "grpo" and not algorithm.turn_mode.any_outcome_operator:
        use = "that mode normalises outcomes itself and accepts grpo only; others: "
        use += modes_that("any_outcome_operator")
        yield ConfigError.of(config, OUTCOME, MODE, accepted=use)
    if algorithm.info_gain_on_error == "zero" and algorithm.turn_mode.unbiased:
        use = "a gain of 0 without a measurement would be in every baseline; drop leaves out the row instead"
        yield ConfigError.of(config, "algorithm.info_gain_on_error", MODE, accepted=use)
    maxrl, penalty = algorithm.advantage_mode == "maxrl", select(config, PENALTY, default=0.0)
    if (maxrl or select(config, f"{REWARD}.path") == OUR_REWARD) and not _is_number(penalty):
        raise ConfigError(key=PENALTY, value=penalty, accepted="expected a number")
    if not maxrl:
        return
    negative = "that mode divides by the mean outcome, and this can make outcomes negative"
    if penalty > 0:
        use = f"{negative}; set it to 0"
        yield ConfigError.of(config, PENALTY, OUTCOME, accepted=use)
    if config.algorithm.use_kl_in_reward:
        use = f"{negative}; use actor_rollout_ref.actor.use_kl_loss instead"
        yield ConfigError.of(config, "algorithm.use_kl_in_reward", OUTCOME, accepted=use)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _reward_reads_as_the_loop(config: DictConfig) -> None:
    given, wanted = select(config, REASONING, default=False), config.search.include_reasoning
    if select(config, f"{REWARD}.path") == OUR_REWARD and given != wanted:
        use = "expected ${search.include_reasoning}, so that loop and reward read the same text"
        raise ConfigError(
            key=REASONING, value=given, accepted=use, beside={"search.include_reasoning": wanted}
        )


def _token_level(config: DictConfig, algorithm: Algorithm) -> Iterator[ConfigError]:
    mode, kind = algorithm.transform_mode, algorithm.uncertainty_kind
    if algorithm.canonical_transform:
        off = {"info_gain_norm_mode": "none", "advantage_mode": "grpo"}
        yield from _would_do_nothing(config, off, "transform_mode", "that transform shapes rewards itself")
        if canonical_kind(kind) != "shannon_entropy":
            use = "that transform is defined on the policy's entropy: set algorithm.uncertainty_kind=shannon_entropy"
            yield ConfigError.of(config, KIND, TRANSFORM, accepted=use)
    correction = config.algorithm.get("rollout_correction") or {}
    if canonical_kind(kind) == "shannon_entropy" and correction.get("bypass_mode", False):
        use = "entropies come with old_log_probs, which are then not computed; use surprisal or predictive_variance"
        yield ConfigError.of(config, KIND, "algorithm.rollout_correction.bypass_mode", accepted=use)
    transform, sepa = TRANSFORMS.get(mode), algorithm.sepa
    if transform and transform.uses_sepa_controller and sepa.schedule == "linear" and sepa.steps == 0:
        use = "SEPA would stay off; give the steps of its ramp"
        yield ConfigError.of(config, "algorithm.sepa.steps", TRANSFORM, accepted=use)


def _detector(name: str) -> None:
    if (own := load_own(DETECTOR, name, DETECTORS)) is not None:
        try_detector(own, DETECTOR, name)


def _planning(config: DictConfig, algorithm: Algorithm) -> Iterator[ConfigError]:
    planning, grams = algorithm.planning, algorithm.strategic_grams
    yield from refusals_of(_detector, planning.detector)
    if grams is not None:
        try:
            parse_grams(grams)
        except (ValueError, TypeError) as error:
            key, use = "algorithm.strategic_grams", "phrases of words, each once"
            raise ConfigError(str(error), key=key, value=grams, accepted=use) from error


def _named_transform(config: DictConfig, algorithm: Algorithm) -> Any:
    turn_mode = algorithm.info_gain_norm_mode
    spec = load_own(TRANSFORM, algorithm.transform_mode, (*TRANSFORMS, *CANONICAL), as_transform_spec)
    if spec and spec.compute_context and turn_mode != "none" and not spec.uses_turn_advantages:
        use = "that transform computes token advantages from episode advantages, so that this key would do nothing; set "
        use += "it to none, or read context.turn_advantages_G and set uses_turn_advantages = True on the transform"
        raise ConfigError.of(config, MODE, TRANSFORM, accepted=use)
    return spec
