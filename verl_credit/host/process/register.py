"""Everything the plugin registers with verl, once per process.

verl's ``verl.plugins`` entry point and ``actor_rollout_ref.model.external_lib`` both import
``verl_credit.host.external``, which calls ``register_all()``. verl swallows whatever goes wrong at the entry
point, so the launching process and the task runner call it again; workers register their own parts
(`verl_credit.host.registry`), and the trainer asks every worker what it has.
"""

from __future__ import annotations

from verl_credit.host.registry import register_parts


def register_all() -> None:
    """Idempotent. Raises ImportError loudly where verl or a dependency is missing."""
    register_parts()
    from verl_credit.host.actor import loss  # noqa: F401  (decorators register)
    from verl_credit.host.engine import loopback_store  # noqa: F401
    from verl_credit.host.rollout import search_agent  # noqa: F401
    from verl_credit.host.step import estimator, trainer  # noqa: F401
