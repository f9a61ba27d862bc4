"""Refuses keys of an environment that would do nothing, and keys that have no meaning in one."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig

from verl_credit.config.fit import DEFAULT
from verl_credit.config.keys.environment import ACTION_FORMS
from verl_credit.config.keys.reads import is_path
from verl_credit.config.keys.section import chosen
from verl_credit.config.resolved import select
from verl_credit.config.settings import INFO_GAIN, CreditSettings
from verl_credit.credit.turn.value_providers import KEY as VALUES
from verl_credit.errors import ConfigError
from verl_credit.names import ENV_AGENT, ENVIRONMENTS, OUR_REWARD
from verl_credit.recipe.agent_loops import tools_given
from verl_credit.recipe.rules.own import load_own
from verl_credit.recipe.rules.pipeline import PENALTY, REWARD

PATH, OUTCOME, WINDOW = "environment.path", "environment.outcome", "environment.window"


def validate_environment(config: DictConfig, settings: CreditSettings) -> Iterator[ConfigError]:
    """Yields a refusal for every fault."""
    given = settings.environment
    if select(config, DEFAULT) != ENV_AGENT:
        for key, _ in chosen(given):
            use = f"no rollout would be in that environment; set {DEFAULT}={ENV_AGENT}, or leave the key out"
            yield ConfigError.of(config, key.name, DEFAULT, accepted=use)
        return
    if given.path is not None and given.path not in ENVIRONMENTS and not is_path(given.path):
        own = "or a dotted path to your own (my_module.MyEnvironment)"
        yield ConfigError.of(config, PATH, accepted=[*ENVIRONMENTS, own])
    load_own("environment.action", given.action, ACTION_FORMS)
    yield from _beside(config, settings)
    if given.window is None:
        return
    from verl_credit.turns.step.outputs import resets_refused  # here, because it imports torch

    for name, value, accepted in resets_refused(settings, config):
        use = f"each step is an output of its own, which that value has no meaning for; expected {accepted}"
        yield ConfigError(key=name, value=value, accepted=use, beside={WINDOW: given.window})


def _beside(config: DictConfig, settings: CreditSettings) -> Iterator[ConfigError]:
    """Yields refusals of what an environment has no use for."""
    given, signals = settings.environment, settings.turn_signals
    if config.search.max_searches:
        use = "an environment offers no search; set it to 0, and put a search into an environment of your own"
        yield ConfigError.of(config, "search.max_searches", DEFAULT, accepted=use)
    for key in tools_given(config):
        use = "the policy acts by its text, and no tool is called; set it to null"
        yield ConfigError.of(config, key, DEFAULT, accepted=use)
    if INFO_GAIN in signals:
        use = "an environment has no gold answer whose probability could grow; take tool_reward (the steps' rewards), none, "
        use += "or a signal of yours"
        key = "algorithm.turn_signal" if settings.algorithm.turn_signals is None else "algorithm.turn_signals"
        yield ConfigError.of(config, key, DEFAULT, accepted=use)
    if config.search.include_reasoning:
        use = "a thought would be a part of the action; set it to false"
        yield ConfigError.of(config, "search.include_reasoning", DEFAULT, accepted=use)
    if select(config, f"{REWARD}.path") == OUR_REWARD and select(config, PENALTY):
        use = "an environment asks for no form of answer; set it to 0, and environment.invalid_reward to a number below 0"
        yield ConfigError.of(config, PENALTY, DEFAULT, accepted=use)
    if settings.algorithm.turn_values == "features":
        use = "no gold answer is read, and nothing is searched; take state, group, critic, column:progress, or your own"
        yield ConfigError.of(config, VALUES, DEFAULT, accepted=use)
    if "tool_reward" in signals and given.outcome != "last":
        use = "the turns before the last have their rewards as turn rewards, so that the outcome is the last step's alone; "
        use += "with another one the last reward would count twice. Set it to last"
        yield ConfigError.of(config, OUTCOME, "algorithm.turn_signal", accepted=use)
    read = given.outcome != "success" or given.success_at is not None or "tool_reward" in signals
    if given.invalid_reward is not None and not read:
        use = "nothing reads rewards with that outcome; set it to null, environment.outcome=return, or outcome=last with "
        use += "algorithm.turn_signal=tool_reward"
        yield ConfigError.of(config, "environment.invalid_reward", OUTCOME, accepted=use)
