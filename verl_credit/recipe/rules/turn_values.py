"""Checks `algorithm.turn_values`, and calls a user's function once, with and without what a value may not know."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from omegaconf import DictConfig

from verl_credit.config.fit import DEFAULT
from verl_credit.config.keys import reads
from verl_credit.config.keys.reads import COLUMN, is_path
from verl_credit.config.resolved import select
from verl_credit.config.settings import CreditSettings
from verl_credit.credit.turn.modes import MODES
from verl_credit.credit.turn.value_providers import KEY, PROVIDERS
from verl_credit.errors import ConfigError
from verl_credit.names import AGENT_NAME, TURN_AGENT
from verl_credit.recipe.agent_loops import LISTED, own_loops
from verl_credit.recipe.rules.own import OWN, load_own, trial
from verl_credit.recipe.rules.turn_mode import CALL, MODE, TRIAL
from verl_credit.recipe.step_size import EACH
from verl_credit.turns.step.state_features import LATER, concealed, same, state_features

CONCEALED = "with outcome, scores, stop reason and the last turn hidden, as in training"


def validate_turn_values(config: DictConfig, settings: CreditSettings) -> Iterator[ConfigError]:
    """Yields a refusal for every fault."""
    name, algorithm = settings.algorithm.turn_values, settings.algorithm
    if not settings.turn_estimator:
        return  # `unread` lists keys without effect, and verl's critic is verl's alone
    for provider in PROVIDERS.values():
        chosen = reads.valued(settings) and provider.name == name
        for need in provider.why_not(partial(select, config), chosen=chosen):
            yield ConfigError.of(config, need.key, KEY, accepted=need.why)
    if name is None:
        return
    if not reads.values_read(settings):
        reading = ", ".join(mode.name for mode in MODES.values() if "values" in mode.reads)
        use = f"nothing there reads values, so that this key would do nothing; set it to null, or {MODE}={reading}"
        beside = "algorithm.algorithm_mode" if algorithm.algorithm_mode else MODE
        yield ConfigError.of(config, KEY, beside, accepted=use)
    yield from _limits(config, settings)
    if is_path(name):
        _try(name)
    elif name not in PROVIDERS and not (name.startswith(COLUMN) and name != COLUMN):
        yield ConfigError(key=KEY, value=name, accepted=[*PROVIDERS, f"{COLUMN}NAME", OWN])


def _limits(config: DictConfig, settings: CreditSettings) -> Iterator[ConfigError]:
    """Yields refusals of too few rollouts of a question, and of a small lam beside values that cannot carry it."""
    provider = PROVIDERS.get(settings.algorithm.turn_values or "")
    if provider is None or not reads.valued(settings):
        return
    if select(config, EACH) < provider.least_rollouts:
        use = f"these values compare the rollouts of a question: at least {provider.least_rollouts}, or {KEY}=features"
        yield ConfigError.of(config, EACH, KEY, accepted=use)
    own = select(config, DEFAULT) not in (AGENT_NAME, TURN_AGENT) or bool(own_loops(config))
    if own and settings.turn_options["lam"] < provider.least_lam:
        use = f"at least {provider.least_lam:g}, or {KEY}=state: success may end a rollout early in an environment or "
        use += "a loop of yours; there these values lost 32 points of area at lam .5 (docs/turn-values.md)"
        yield ConfigError.of(config, "algorithm.lam", KEY, LISTED, accepted=use)


def _try(name: str) -> None:
    """Refuses a function that does not take the trajectories of training, or reads what comes after a state."""
    function = load_own(KEY, name)
    with trial(KEY, name, f"{CALL}, {CONCEALED},"):
        known = [state_features(function, concealed(one)) for one in TRIAL]
        if len({len(state) for states in known for state in states}) > 1:
            raise ValueError(f"it returned {known}; expected as many numbers for every turn")
    for trajectory, states in zip(TRIAL, known, strict=True):
        changed = [replace(trajectory, outcome=outcome, scores={"em": outcome}) for outcome in (0.0, 1.0)]
        for one in (*changed, concealed(trajectory, before=max(len(trajectory.turns) - 2, 0))):
            with trial(KEY, name, CALL):
                found = state_features(function, one)[: len(states)]
            if not same(found, states[: len(found)]):
                use = f"it gave {found} for a trajectory for which it gave {states} {CONCEALED}; {LATER}"
                raise ConfigError(key=KEY, value=name, accepted=use)
