"""Checks the turn mode, which is a name or a dotted path, and its options."""

from __future__ import annotations

from verl_credit.config.keys import Algorithm, reads
from verl_credit.config.resolved import Tree
from verl_credit.config.settings import CreditSettings
from verl_credit.credit.plugins import load
from verl_credit.credit.turn.anchors import exact_anchors, similar_anchors
from verl_credit.credit.turn.modes import MODES
from verl_credit.errors import ConfigError, did_you_mean
from verl_credit.recipe.rules.own import refuse_what_is_no_operator, try_operator
from verl_credit.recipe.rules.turn_signals import TRIAL
from verl_credit.turns.assign import ANCHOR_KEY as ANCHOR
from verl_credit.turns.assign import ANCHORS

MODE, PARAMS = "algorithm.info_gain_norm_mode", "algorithm.turn_params"
SIMILARITY = "algorithm.turn_anchor_similarity"
# These options have their own keys.
KEYS = {
    "gamma": "algorithm.gamma",
    "alpha": "algorithm.adv_rescale_alpha",
    "clip_beta": "actor_rollout_ref.actor.policy_loss.clip_beta",
    "norm_by_std": "algorithm.norm_adv_by_std_in_grpo",
    "outcome_operator": "algorithm.advantage_mode",
    "gain_scale": "algorithm.info_gain_curriculum.gain",
    "outcome_scale": "algorithm.info_gain_curriculum.outcome",
}
BROUGHT = ("anchor_B_K1", "turn_tokens_B_K1")
"""The optional tables that the host makes."""


def validate_turn_mode(config: Tree, settings: CreditSettings) -> None:
    """Raises ConfigError for a mode that cannot be loaded, called or given its tables, and for options that it lacks."""
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
    if missing := [table for table in mode.needs if table not in BROUGHT]:
        why = (
            "and this trainer has no critic"
            if missing == ["value_B_K1"]
            else "which this trainer does not bring"
        )
        use = f"it needs {', '.join(missing)}, {why}; call it in the library instead"
        raise ConfigError(key=MODE, value=name, accepted=use)
    if reads.anchored(settings):
        _anchor(config, settings.algorithm)
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
    try:
        mode.check_options(settings.turn_options)
    except ValueError as error:
        beside = {MODE: name}
        if "norm_by_std" in str(error):
            beside[KEYS["norm_by_std"]] = settings.turn_options["norm_by_std"]
        value = settings.algorithm.turn_params
        raise ConfigError(key=PARAMS, value=value, beside=beside, accepted=str(error)) from error
    if settings.turn_estimator:
        try_operator(config, settings.algorithm, mode, MODE, "turn")


def _anchor(config: Tree, algorithm: Algorithm) -> None:
    """Calls a user's anchor once for each of two small trajectories."""
    name, similarity = algorithm.turn_anchor, algorithm.turn_anchor_similarity
    if name == "prefix" and similarity is not None:
        use = (
            "a prefix is a list of tokens, and similarity compares texts; set it to null, or use observation"
        )
        raise ConfigError.of(config, SIMILARITY, ANCHOR, accepted=use)
    if name in ANCHORS:
        return
    if not {".", ":"} & set(name):
        own = "or a dotted path to your own (my_module.my_anchor)"
        raise ConfigError(key=ANCHOR, value=name, accepted=[*ANCHORS, own], shown=repr(name))
    try:
        own = load(name, ANCHOR)
        refuse_what_is_no_operator(own, ANCHOR, name)
        states, groups = [own(trajectory) for trajectory in TRIAL], [0] * len(TRIAL)
        if similarity is None:
            exact_anchors(states, groups)
        else:
            similar_anchors(states, groups, threshold=similarity)
        if [len(each) for each in states] != [len(trajectory.turns) for trajectory in TRIAL]:
            raise ValueError(f"{[len(each) for each in states]} states for trajectories of 2 and 1 turns")
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            key=ANCHOR, value=name, accepted=f"a call with two small trajectories: {reason}"
        ) from error
