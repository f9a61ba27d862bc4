"""The bounds of every option's range: accepted where they belong to it, and refused where they do not."""

import math

import pytest

from verl_credit.credit.turn.options import RANGES, check_range


@pytest.mark.parametrize("name", RANGES)
def test_a_bound_is_accepted_where_it_belongs_to_the_range(name):
    low, high, low_allowed, high_allowed = RANGES[name]
    for bound, allowed in ((low, low_allowed), (high, high_allowed)):
        if allowed:
            check_range(name, bound)
        elif math.isfinite(bound):
            with pytest.raises(ValueError, match=rf"^{name}={bound!r}: expected a number "):
                check_range(name, bound)
