"""Checks the turn signals' names and weights, and calls a user's signals once."""

from __future__ import annotations

import inspect

from verl_credit.config.fit import DEFAULT
from verl_credit.config.keys.reads import is_path
from verl_credit.config.resolved import Config, Tree, select
from verl_credit.config.settings import INFOPO, CreditSettings
from verl_credit.errors import ConfigError, did_you_mean
from verl_credit.names import AGENT_NAME, AGENTS
from verl_credit.recipe.agent_loops import own_loops, tools_given
from verl_credit.recipe.rules.own import refuse_what_is_no_operator
from verl_credit.redact import redact_value
from verl_credit.turns.scorers import SCORERS
from verl_credit.turns.signals.known import COLUMN, SIGNALS, find_signal
from verl_credit.turns.signals.own import GroupSignal, TrajectorySignal
from verl_credit.turns.signals.signal import Trajectory, Turn

SIGNAL, SEVERAL, MODE = (
    f"algorithm.{name}" for name in ("turn_signal", "turn_signals", "info_gain_norm_mode")
)
SCORER, BYPASS = "algorithm.info_gain_scorer", "algorithm.rollout_correction.bypass_mode"
TEMPERATURE = "actor_rollout_ref.rollout.temperature"
PARAMS = "algorithm.turn_signal_params"
ACCEPTED = ["auto", "none", *SIGNALS, f"{COLUMN}NAME", "or a dotted path to your own (my_module.my_signal)"]


def validate_turn_signals(config: Tree, settings: CreditSettings) -> None:
    """Raises ConfigError for the first fault."""
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
        _check(config, settings, SIGNAL if several is None else SEVERAL, each)


def _check(config: Tree, settings: CreditSettings, key: str, name: str) -> None:
    own = is_path(name)
    if not own and name not in SIGNALS and not (name.startswith(COLUMN) and name != COLUMN):
        hint = did_you_mean(name, [*SIGNALS])
        raise ConfigError(key=key, value=name, accepted=ACCEPTED, shown=f"{name!r}{hint}")
    if name == "tool_reward" and config_has_no_tool(config):
        use = "the search gives no reward, and the recipe names no other tool (multi_turn.tool_config_path) "
        use += "and no agent loop of yours (agent_loop_config_path), whose rows may have rewards"
        raise ConfigError(key=key, value=name, accepted=use)
    if name == INFOPO:
        _infopo(config, settings, key)
    if not own:
        return
    try:
        signal = find_signal(name, settings.algorithm.turn_signal_params, key)
    except ValueError as error:
        raise ConfigError(str(error), key=key, value=name, accepted=ACCEPTED) from error
    refuse_what_is_no_operator(signal.function, key, name)
    loop = select(config, DEFAULT)
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
        kind = (
            "it cannot be called"
            if isinstance(signal, TrajectorySignal)
            else "a call with two small trajectories raised"
        )
        raise ConfigError(
            key=key,
            value=name,
            beside={PARAMS: redact_value(PARAMS, signal.params)},
            accepted=f"{kind}: {signal.message(error)}",
        ) from None  # the chained error would show the secrets of the message


def _infopo(config: Tree, settings: CreditSettings, key: str) -> None:
    """Checks that infopo's two terms come from the same policy at the same temperature."""
    if SCORERS[settings.algorithm.info_gain_scorer].in_rollout:
        use = "infopo scores next responses after masked observations, which that scorer does not; use branch or rows"
        raise ConfigError.of(config, SCORER, key, accepted=use)
    if select(config, BYPASS):
        use = "infopo compares old_log_probs of the trained policy, which are then not computed; set it to false"
        raise ConfigError.of(config, BYPASS, key, accepted=use)
    if select(config, TEMPERATURE) != 1:
        use = (
            "infopo compares old_log_probs, which are taken at it, with scores at temperature 1; set it to 1"
        )
        raise ConfigError.of(config, TEMPERATURE, key, accepted=use)


def config_has_no_tool(config: Config) -> bool:
    """Does every row use the search agent without a tool? A row may name a user's agent loop in its column ``agent_name``,
    where the recipe lists them. Raises ConfigError for a list that cannot be read."""
    default = select(config, DEFAULT)
    return default == AGENT_NAME and not tools_given(config) and not own_loops(config)


_CALL = {"turn": 0, "name": "search", "arguments": '{"query": "river of Paris"}', "reward": None}
TRIAL = [
    Trajectory(
        [
            Turn("<tool_call>...</tool_call>", [_CALL], "Paris lies on the Seine.", 0.5),
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
