"""What verl imports in every process of a run (entry point ``verl.plugins``): the CPU platform, and nothing else.

verl reads the platform while it is imported. The rest takes seconds to import, and most of a run's processes (load balancer,
rewards, queues) use nothing of it: the processes that do register it themselves (`verl_credit.host.process.register`).
"""

from verl_credit.host.cpu.register import register

register()
