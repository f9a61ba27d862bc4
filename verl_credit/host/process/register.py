"""Everything the plugin registers with verl, once per process: in the one that launches a run and in the one that trains it.

Actors and agent-loop workers register what they use (`verl_credit.host.registry`), and the trainer asks each of them what it
has.
"""

from __future__ import annotations

from verl_credit.host.registry import register_parts


def register_all() -> None:
    """Idempotent. Raises ImportError where verl or a dependency is missing."""
    register_parts()
    from verl_credit.host.actor import loss  # noqa: F401  (decorators register)
    from verl_credit.host.measure import trainer as measuring  # noqa: F401
    from verl_credit.host.rollout import search_agent  # noqa: F401
    from verl_credit.host.step import async_trainers, estimator  # noqa: F401
