"""verl imports this module in every process of a run (entry point ``verl.plugins``), and then reads the platform. It
registers the CPU platform only: everything else of ours takes seconds to import, and the processes that use more register it
themselves (`verl_credit.host.registry`). The process that launches verl's trainer hands a launch with our keys over here.
"""

import os
import sys

from verl_credit.host.cpu import platform  # noqa: F401  (the import registers the platform)
from verl_credit.names import TAKE_OVER

if TAKE_OVER in os.environ or any("main_ppo" in word for word in sys.orig_argv):
    from verl_credit.host.process.main_ppo import hand_over

    hand_over(sys.orig_argv)
