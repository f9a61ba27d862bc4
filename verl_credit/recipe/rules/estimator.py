"""Checks that the estimator exists, and that no key of turn credit stands beside one of verl's, which reads none of them."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig

from verl_credit.config.resolved import select
from verl_credit.config.settings import CreditSettings
from verl_credit.credit.turn.modes import MODES
from verl_credit.errors import ConfigError
from verl_credit.names import ADV_ESTIMATOR
from verl_credit.recipe.rules.own import own_modules

KEY = "algorithm.adv_estimator"
# fmt: off
VERLS = (
    "gae", "grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo", "opo", "grpo_passk", "gpg",
    "rloo_vectorized", "grpo_vectorized", "optimal_token_baseline", "tir_optimal_token_baseline", "gdpo",
)
"""The estimators of verl 0.9.1."""
# fmt: on
MODE = "algorithm.info_gain_norm_mode"
ELSEWHERE = {
    **{
        name.replace("-", "_"): f"{MODE}={name}"
        for name, mode in MODES.items()
        if name != "none" and not mode.needs
    },
    "igpo": f"{MODE}=joint",
    "a2tgpo": "credit=released or credit=paper",
    "gtpo": "algorithm.transform_mode=gtpo",
    "grpo_s": "algorithm.transform_mode=grpo_s",
    "maxrl": "algorithm.advantage_mode=maxrl",
}
"""Estimators of other projects, and turn modes in an estimator's place: where the method is here."""
OFF = {
    "info_gain_norm_mode": ("none",), "turn_signal": ("auto", "none"), "turn_signals": (None,), "advantage_mode": ("grpo",),
    "transform_mode": ("none",), "algorithm_mode": (None,),
}  # fmt: skip
"""The keys of ``algorithm`` that our estimator reads and verl's do not, with the values that ask for nothing."""


def validate_estimator(config: DictConfig, settings: CreditSettings) -> Iterator[ConfigError]:
    name = settings.algorithm.adv_estimator
    if name == ADV_ESTIMATOR:
        return
    if name not in VERLS and not own_modules(config):
        if place := ELSEWHERE.get(name.lower().replace("-", "_")):
            use = f"verl has no estimator of that name; here it is {KEY}={ADV_ESTIMATOR} with {place}"
            yield ConfigError(key=KEY, value=name, accepted=use)
        else:
            yield ConfigError(key=KEY, value=name, accepted=[ADV_ESTIMATOR, *VERLS])
        return
    if given := turn_keys(config):
        these = "these keys" if len(given) > 1 else "this key"
        use = f"that estimator replaces ours and reads no turn, so that {these} would do nothing; leave {KEY} out (it is "
        use += f"{ADV_ESTIMATOR} then), or choose credit=verl: verl's own estimator, our agent loop, no turn credit"
        yield ConfigError(key=KEY, value=name, beside=given, accepted=use)


def turn_keys(config: DictConfig) -> dict[str, object]:
    """The keys that ask for turn or token credit, with their values."""
    values = {name: select(config, f"algorithm.{name}") for name in OFF}
    return {f"algorithm.{name}": value for name, value in values.items() if value not in OFF[name]}
