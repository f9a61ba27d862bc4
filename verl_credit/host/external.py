"""verl imports this module in every process of a run (entry point ``verl.plugins``). It registers the CPU platform only; in
the process that launches verl's trainer it hands a launch with our keys over.

verl loads its plugins in the middle of its own import, and then reads the platform. Everything else of ours takes seconds
to import, and most of a run's processes (load balancer, rewards, queues) use none of it. The processes that use more
register it themselves (`verl_credit.host.registry`).
"""

import sys

from verl_credit.host.cpu import platform  # noqa: F401  (the import registers the platform)

if any("main_ppo" in word for word in sys.orig_argv):
    from verl_credit.host.process.main_ppo import hand_over

    hand_over(sys.orig_argv)
