"""How many cases the slow fuzz tests draw. ``make fuzz CASES=2000`` draws as many as one likes."""

import os

FUZZ_CASES = int(os.environ.get("VERL_CREDIT_FUZZ_CASES", "120"))
