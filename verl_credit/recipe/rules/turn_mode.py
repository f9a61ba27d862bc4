"""Checks the turn mode and the turn signals, which are names or dotted paths, and calls a user's once."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from omegaconf import DictConfig

from verl_credit.config.fit import DEFAULT
from verl_credit.config.gone import gone_value
from verl_credit.config.keys import reads
from verl_credit.config.keys.reads import COLUMN, is_path
from verl_credit.config.resolved import select
from verl_credit.config.settings import CreditSettings
from verl_credit.credit.plugins.load import plugin_path
from verl_credit.credit.turn.anchors import exact_anchors
from verl_credit.credit.turn.modes import MODES
from verl_credit.credit.turn.value_providers import KEY as VALUES
from verl_credit.credit.turn.value_providers import PROVIDERS
from verl_credit.errors import ConfigError, did_you_mean
from verl_credit.names import AGENT_NAME, AGENTS, ENV_AGENT, TURN_AGENT
from verl_credit.recipe.agent_loops import own_loops, tools_given
from verl_credit.recipe.rules.own import OWN, load_own, refuse_what_is_no_operator, trial, try_operator
from verl_credit.recipe.rules.refusals import refusals_of
from verl_credit.redact import redact_value
from verl_credit.turns.step.anchor_table import ANCHOR_KEY as ANCHOR
from verl_credit.turns.step.anchor_table import ANCHORS
from verl_credit.turns.step.signals.built_in import SIGNALS, find_signal
from verl_credit.turns.step.signals.own import GroupSignal, OwnSignal, TrajectorySignal
from verl_credit.turns.step.signals.signal import Trajectory, Turn

MODE, PARAMS = "algorithm.info_gain_norm_mode", "algorithm.turn_params"
TIED = "algorithm.tied_groups"
SIGNAL, SEVERAL = "algorithm.turn_signal", "algorithm.turn_signals"
SIGNAL_PARAMS = "algorithm.turn_signal_params"
ACCEPTED = ["auto", "none", *SIGNALS, f"{COLUMN}NAME", "or a dotted path to your own (my_module.my_signal)"]
# These options have their own keys.
KEYS = {
    "gamma": "algorithm.gamma",
    "lam": "algorithm.lam",
    "alpha": "algorithm.adv_rescale_alpha",
    "clip_beta": "actor_rollout_ref.actor.policy_loss.clip_beta",
    "norm_by_std": "algorithm.norm_adv_by_std_in_grpo",
    "outcome_operator": "algorithm.advantage_mode",
    "gain_scale": "algorithm.info_gain_curriculum.gain",
    "outcome_scale": "algorithm.info_gain_curriculum.outcome",
}
CALL = "a call with two small trajectories"
BROUGHT = ("anchor_B_K1", "turn_tokens_B_K1")
"""The optional tables that the host makes."""


def validate_turn_mode(config: DictConfig, settings: CreditSettings) -> Iterator[ConfigError]:
    """Yields refusals of a mode that cannot be loaded, called or given its tables, and for options that it lacks."""
    name = settings.algorithm.info_gain_norm_mode
    if name not in MODES and not plugin_path(name):
        raise ConfigError(key=MODE, value=name, accepted=[*MODES, OWN], shown=repr(name))
    try:
        mode = settings.algorithm.turn_mode
    except ValueError as error:
        raise ConfigError(str(error), key=MODE, value=name, accepted=[*MODES]) from error
    if name not in MODES:
        refuse_what_is_no_operator(mode.function, MODE, name)
    brought = (*BROUGHT, *(["value_B_K1"] if settings.algorithm.turn_values else []))
    if missing := [table for table in mode.needs if table not in brought]:
        use = "which this trainer does not bring; call it in the library instead"
        if missing == ["value_B_K1"]:
            use = f"and {VALUES} is null: set it to {', '.join(PROVIDERS)}, {COLUMN}NAME or my_module.my_features"
        raise ConfigError(key=MODE, value=name, accepted=f"it needs {', '.join(missing)}, {use}")
    if settings.turn_estimator and settings.algorithm.tied_groups == "skip" and not reads.grouped(settings):
        use = "that mode compares no rollouts of a prompt, and rows would be left out by their own outcome; set it to keep"
        yield ConfigError.of(config, TIED, MODE, accepted=use)
    if reads.anchored(settings):
        _anchor(settings.algorithm.turn_anchor)
    refused = False
    for option, value in settings.algorithm.turn_params.items():
        key = f"{PARAMS}.{option}"
        if option in KEYS:
            use = f"that option has a key of its own: {KEYS[option]}"
            yield ConfigError(key=key, value=value, accepted=use)
        elif option not in mode.options and not mode.takes_any_option:
            has = [known for known in mode.options if known not in KEYS] or ["no options of its own"]
            use = f"it has {', '.join(has)}{did_you_mean(option, has)}"
            yield ConfigError(key=key, value=value, beside={MODE: name}, accepted=use)
        else:
            continue
        refused = True
    if refused:
        return  # the mode cannot be called with them
    try:
        mode.check_options(settings.turn_options)
    except ValueError as error:
        beside = {MODE: name}
        if "norm_by_std" in str(error):
            beside[KEYS["norm_by_std"]] = settings.turn_options["norm_by_std"]
        value = settings.algorithm.turn_params
        raise ConfigError(key=PARAMS, value=value, beside=beside, accepted=str(error)) from error
    # The laws hold for a shipped mode's defaults, and for the options that `default_credit` chooses.
    own = name not in MODES or (settings.algorithm.turn_params and not config.credit_reason)
    if settings.turn_estimator and own:
        try_operator(config, settings.algorithm, mode, MODE, "turn")


def _anchor(name: str) -> None:
    """Calls a user's anchor once for each of two small trajectories."""
    own = load_own(ANCHOR, name, ANCHORS)
    if own is None:
        return
    with trial(ANCHOR, name, CALL):
        states, groups = [own(trajectory) for trajectory in TRIAL], [0] * len(TRIAL)
        exact_anchors(states, groups)
        if [len(each) for each in states] != [len(trajectory.turns) for trajectory in TRIAL]:
            raise ValueError(f"{[len(each) for each in states]} states for trajectories of 2 and 1 turns")


def validate_turn_signals(config: DictConfig, settings: CreditSettings) -> Iterator[ConfigError]:
    """Yields a refusal for every fault."""
    algorithm = settings.algorithm
    if not settings.turn_estimator:
        return  # `unread` lists keys without effect
    mode, name, several = algorithm.turn_mode, algorithm.turn_signal, algorithm.turn_signals
    given = name not in ("auto", "none") or several is not None
    if given and not algorithm.takes_turn_rewards:
        use = "that mode reads no turn rewards, so that this key would do nothing; leave it out, or use another mode"
        if is_path(algorithm.info_gain_norm_mode):
            use += ' (one of your own that reads them and declares `reads` has "gains" among them)'
        raise ConfigError.of(config, SIGNAL if several is None else SEVERAL, MODE, accepted=use)
    if several is not None and name != "auto":
        use = "set one of the two; the other has every signal with its weight"
        raise ConfigError.of(config, SIGNAL, SEVERAL, accepted=use)
    if several is not None and not all(several.values() or [0]):
        use = "a mapping of turn signals to weights other than 0; leave out a signal that is to count for nothing"
        raise ConfigError(key=SEVERAL, value=several, accepted=use)
    if mode.reads_turn_rewards and not algorithm.signal_weights and mode.default_signal != "none":
        use = "that mode compares turn rewards and has none to compare; set info_gain_norm_mode=none, or a signal"
        raise ConfigError.of(config, SIGNAL, MODE, accepted=use)
    for each in algorithm.signal_weights:
        yield from refusals_of(_check, config, settings, SIGNAL if several is None else SEVERAL, each)


def _check(config: DictConfig, settings: CreditSettings, key: str, name: str) -> None:
    """Raises ConfigError for a signal that is unknown, or that this run cannot call."""
    own = not name.startswith(COLUMN) and name not in SIGNALS and bool(plugin_path(name))
    if not own and name not in SIGNALS and not (name.startswith(COLUMN) and name != COLUMN):
        if gone := gone_value(SIGNAL, name):
            raise ConfigError(key=key, value=name, accepted=gone)
        raise ConfigError(key=key, value=name, accepted=ACCEPTED, shown=repr(name))
    loop = select(config, DEFAULT)
    # A row may name an agent loop of the user's in its column agent_name, where the recipe lists them.
    if name == "tool_reward" and loop == AGENT_NAME and not tools_given(config) and not own_loops(config):
        use = "the search gives no reward, and the recipe names no other tool (multi_turn.tool_config_path) "
        use += "and no agent loop of yours (agent_loop_config_path), whose rows may have rewards"
        raise ConfigError(key=key, value=name, accepted=use)
    try:
        signal = find_signal(name, settings.algorithm.turn_signal_params, key)
    except ValueError as error:
        raise ConfigError(str(error), key=key, value=name, accepted=ACCEPTED) from error
    if not isinstance(signal, OwnSignal):
        return
    refuse_what_is_no_operator(signal.function, key, name)
    if "pages" in signal.wants and loop in (TURN_AGENT, ENV_AGENT) and not own_loops(config):
        use = f"that loop names no pages, so that no turn would have a reward; set {DEFAULT}={AGENT_NAME}, or take "
        use += "another signal"
        raise ConfigError(key=key, value=name, beside={DEFAULT: loop}, accepted=use)
    if isinstance(signal, TrajectorySignal) and loop not in AGENTS:  # a row may name another loop
        use = f"that signal is a coroutine, and only {' and '.join(AGENTS)} await one; set {DEFAULT} to one of them, or "
        use += "take a signal that your loop gives (tool_reward: its turn_rewards) or a function of a prompt's rollouts"
        raise ConfigError(key=key, value=name, beside={DEFAULT: loop}, accepted=use)
    try:
        inspect.signature(signal.function).bind(None, **signal.params)
        if isinstance(signal, GroupSignal):
            for trajectory, values in zip(TRIAL, signal.call(TRIAL), strict=True):
                signal.checked(values, len(trajectory.tool_turns), "a trajectory of a trial")
    except (Exception, SystemExit) as error:
        tried = "it cannot be called" if isinstance(signal, TrajectorySignal) else f"{CALL} raised"
        use, beside = f"{tried}: {signal.message(error)}", {SIGNAL_PARAMS: redact_value("", signal.params)}
        # The chained error would show the secrets of the message.
        raise ConfigError(key=key, value=name, beside=beside, accepted=use) from None


_CALL = {"turn": 0, "name": "search", "arguments": '{"query": "river of Paris"}', "reward": None}
TRIAL = [
    Trajectory(
        [
            Turn("<tool_call>...</tool_call>", [_CALL], "Paris lies on the Seine.", 0.5, ["p1"]),
            Turn("<answer>Seine</answer>"),
        ],
        ["Seine"],
        "answer",
        outcome=1.0,
        extra_info={"question": "On which river does Paris lie?", "index": 0},
        scores={"em": 1.0},
    ),
    Trajectory(
        [Turn("I do not know.")],
        ["Seine"],
        "no_answer",
        outcome=0.0,
        extra_info={"index": 0},
        scores={"em": 0.0},
    ),
]
"""The rollouts with which a user's signal is called: one with a tool turn, one without."""
