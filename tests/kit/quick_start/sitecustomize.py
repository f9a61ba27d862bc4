"""Python reads this first in every process that a test starts, xdist's workers too (tests/conftest.py sets the path).

The garbage collector runs seldom: it takes a fifth of the time in which torch and verl are imported, and a run of Ray
imports them in nine processes.
"""

import gc

gc.set_threshold(50_000, 20, 20)
