"""The turn mode: a name or a dotted path, and its options."""

from __future__ import annotations

from omegaconf import DictConfig

from verl_credit.config.settings import CreditSettings
from verl_credit.credit.turn.modes import MODES
from verl_credit.errors import ConfigError, did_you_mean
from verl_credit.recipe.rules.own import refuse_what_is_no_operator, try_operator

MODE, PARAMS = "algorithm.info_gain_norm_mode", "algorithm.turn_params"
# Options that have a key of their own.
KEYS = {
    "gamma": "algorithm.gamma",
    "alpha": "algorithm.adv_rescale_alpha",
    "clip_beta": "actor_rollout_ref.actor.policy_loss.clip_beta",
    "norm_by_std": "algorithm.norm_adv_by_std_in_grpo",
    "outcome_operator": "algorithm.advantage_mode",
    "gain_scale": "algorithm.info_gain_curriculum.gain",
    "outcome_scale": "algorithm.info_gain_curriculum.outcome",
}


def validate_turn_mode(config: DictConfig, settings: CreditSettings) -> None:
    """Raise ConfigError for a mode that cannot be found, called or brought its tables, and for options that it does not
    have."""
    name = settings.algorithm.info_gain_norm_mode
    if name not in MODES and not {".", ":"} & set(name):
        own = "or a dotted path to your own (my_module.my_name)"
        raise ConfigError(key=MODE, value=name, accepted=[*MODES, own], shown=repr(name))
    try:
        mode = settings.algorithm.turn_mode
    except ValueError as error:
        raise ConfigError(str(error), key=MODE, value=name, accepted=[*MODES]) from error
    if name not in MODES:
        refuse_what_is_no_operator(mode.function, MODE, name)
    if "value_B_K1" in mode.needs:
        use = "it needs the value of each turn (value_B_K1), and this trainer has no critic; call it in the library instead"
        raise ConfigError(key=MODE, value=name, accepted=use)
    for option, value in settings.algorithm.turn_params.items():
        key = f"{PARAMS}.{option}"
        if option in KEYS:
            raise ConfigError(
                key=key, value=value, accepted=f"that option has a key of its own: {KEYS[option]}"
            )
        if option not in mode.options and not mode.takes_any_option:
            has = [known for known in mode.options if known not in KEYS] or ["no options of its own"]
            hint = did_you_mean(option, has)
            raise ConfigError(
                key=key, value=value, beside={MODE: name}, accepted=f"it has {', '.join(has)}{hint}"
            )
    if settings.turn_estimator:
        try_operator(config, settings.algorithm, mode, MODE, "turn")
