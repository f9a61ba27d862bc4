"""The bounds of every option's range: accepted where they belong to it, and refused where they do not."""

import math

import pytest

from kit.each import each
from verl_credit.credit.turn.modes import MODES

RANGES = {(name, option): range for name, mode in MODES.items() for option, range in mode.ranges.items()}


@each("mode, option", RANGES)
def test_a_bound_is_accepted_where_it_belongs_to_the_range(mode, option):
    of_option = RANGES[mode, option]
    for bound, allowed in ((of_option.low, of_option.low_allowed), (of_option.high, of_option.high_allowed)):
        if allowed:
            MODES[mode].check_options({option: bound})
        elif math.isfinite(bound):
            with pytest.raises(ValueError, match=rf"^{option}={bound!r}: expected a number "):
                MODES[mode].check_options({option: bound})


@pytest.mark.parametrize("mode", MODES.values(), ids=lambda mode: mode.name)
def test_every_number_has_a_range(mode):
    numbers = {name for name, default in mode.options.items() if type(default) in (int, float)}
    assert numbers == set(mode.ranges)
