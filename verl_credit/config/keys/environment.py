"""``environment.*``: what the rollouts of the agent loop ``env_agent`` act in (docs/environments.md)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from verl_credit.config.keys.section import Expected, Section
from verl_credit.names import ENVIRONMENTS

ACTION_FORMS = ("text", "tag")


class Environment(Section):
    prefix = "environment"

    path: Annotated[
        Annotated[str, Field(min_length=1)] | None,
        Expected(f"{', '.join(ENVIRONMENTS)}, a dotted path to your own (my_module.MyEnvironment), or null"),
    ] = None
    """The environment of every rollout: an adapter, or a class with reset, step and close. Required with env_agent."""
    kwargs: Annotated[dict[str, Any], Expected("a mapping of names to values")] = {}
    """Handed to the class for every rollout, such as the id of a gymnasium environment."""
    max_steps: Annotated[int, Field(ge=1, le=1000)] = 20
    """Turns after which a rollout is truncated; each turn is a step."""
    window: Annotated[int, Field(ge=0, le=1000)] | None = None
    """Each turn is a row of its own, whose prompt has the first observation, the last `window` steps (observation and
    action) and the current observation; null: a rollout is one dialogue that grows."""
    action: Annotated[
        str, Expected(f"{', '.join(ACTION_FORMS)}, or a dotted path to your own (my_module.my_parser)")
    ] = "text"
    """text: the whole turn without its thoughts is the action; tag: what stands in its last <action>...</action>; or
    my_module.my_parser, called with the turn's text (None: no action)."""
    list_actions: bool = True
    """The admissible actions are listed after each observation, where the environment names them; others are invalid."""
    invalid: Literal["tell", "end"] = "tell"
    """After an invalid action; tell: nothing moves, the policy reads why, and a step is used; end: the rollout ends."""
    invalid_reward: float | None = None
    """Reward of a turn with an invalid action; null: it has none."""
    outcome: Literal["success", "return", "last"] = "success"
    """The row's outcome: success (0 or 1), the sum of the rewards, or the last step's reward."""
    success_at: float | None = None
    """Where the environment does not say success: a return of at least this is one."""
    processes: Annotated[int, Field(ge=1, le=64)] = 2
    """Processes of environments for each agent-loop worker."""
    deadline_s: Annotated[float, Field(ge=1e-3)] = 20.0
    """Seconds that a step may take, and a reset in a process that has started; then its process is ended."""
    start_s: Annotated[float, Field(ge=1e-3)] = 120.0
    """Seconds that the first reset of a process may take, in which it imports what it needs."""
    max_chars: Annotated[int, Field(ge=16)] = 4000
    """Characters of an observation; the middle of a longer one is left out, and the text says so."""
