"""Checks `algorithm.turn_continuations`: what a run has to be like so that a state can be tried again."""

from __future__ import annotations

from collections.abc import Iterator

from verl_credit.config.resolved import Tree, select
from verl_credit.config.settings import CreditSettings
from verl_credit.errors import ConfigError
from verl_credit.names import ASYNC_MODES
from verl_credit.recipe.agent_loops import LISTED, tools_given
from verl_credit.recipe.decisions import MODE
from verl_credit.recipe.rules.trainer_mode import LOG_PROBS, POOL, REWARDS, ROLLOUT
from verl_credit.turns.state_features import KEY

CONTINUATIONS = "algorithm.turn_continuations"
REPEATABLE, CHOOSE = f"{CONTINUATIONS}.repeatable_tools", f"{CONTINUATIONS}.choose"
POLICY = "V is of the policy at temperature 1, with nothing cut off"
ONLY = {
    "algorithm.gamma": (1, "continuations measure the outcome, whenever it comes"),
    "algorithm.use_kl_in_reward": (
        False,
        "the penalty would be in the outcomes of rollouts and not in these",
    ),
    f"{ROLLOUT}.full_determinism": (False, "every continuation from a state would be the same text"),
    f"{ROLLOUT}.temperature": (1, POLICY),
    f"{ROLLOUT}.top_p": (1, POLICY),
    f"{ROLLOUT}.top_k": (-1, POLICY),
}
"""The only value that a key may have, and why."""


def validate_continuations(config: Tree, settings: CreditSettings) -> Iterator[ConfigError]:
    """Yields a refusal for every fault."""
    algorithm = settings.algorithm
    if select(config, MODE) in ASYNC_MODES:
        use = "continuations need an engine without other rollouts to make, and still their policy; set it to credit"
        yield ConfigError.of(config, MODE, KEY, accepted=use)
    for key, (only, why) in ONLY.items():
        if select(config, key) not in (None, only):
            yield ConfigError.of(config, key, KEY, accepted=f"{why}; set it to {str(only).lower()}")
    tools = [*tools_given(config), *([LISTED] if select(config, LISTED) else [])]
    if tools and not algorithm.turn_continuations.repeatable_tools:
        use = "a rollout's calls are made again before a state is tried again; set it to true if your tools allow that"
        yield ConfigError.of(config, REPEATABLE, KEY, *tools, accepted=use)
    if algorithm.signal_weights:
        key, off = "algorithm.turn_signal", "none"
        if algorithm.turn_signals is not None:
            key, off = "algorithm.turn_signals", "null"
        use = f"continuations measure the outcome, and turn rewards would be missing in V; set it to {off}"
        yield ConfigError.of(config, key, KEY, accepted=use)
    if select(config, REWARDS) and not select(config, POOL):
        use = "verl asks a reward model beside the actor after the engine sleeps; set it to true"
        yield ConfigError.of(config, POOL, KEY, REWARDS, accepted=use)
    if algorithm.turn_continuations.choose == "uncertainty" and not select(config, LOG_PROBS):
        use = "states are chosen while the engine is awake, and by its log-probs; set it to true"
        yield ConfigError.of(config, LOG_PROBS, CHOOSE, accepted=use)
