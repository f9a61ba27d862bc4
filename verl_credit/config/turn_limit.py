"""How many turns a trajectory of the recipe's agent loop may have."""

from __future__ import annotations

from verl_credit.config.resolved import Config, select
from verl_credit.names import AGENT_NAME

MOST = "actor_rollout_ref.rollout.multi_turn.max_assistant_turns"
DEFAULT = "actor_rollout_ref.rollout.agent.default_agent_loop"


def turns_at_most(config: Config) -> tuple[str, int | None]:
    """(the key that says it, the turns); None where nothing but the row's length, or a loop of the user's, ends a row."""
    if select(config, DEFAULT) in (None, AGENT_NAME):
        return "search.max_searches+1", config.search.max_searches + 1
    return MOST, select(config, MOST) or None
