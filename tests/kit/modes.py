"""Options for tests that run every turn mode."""

from verl_credit.credit import MODES


def read_by(mode: str, **options) -> dict:
    """``info_gain_norm_mode`` and those of the options that the mode reads; it refuses the others."""
    known = {name: value for name, value in options.items() if name in MODES[mode].options}
    return {"info_gain_norm_mode": mode, **known}


NO_TABLES = [name for name, mode in MODES.items() if not mode.needs]
"""For tests that bring outcomes and turn rewards alone. The laws, and `test_turn_methods`, bring what the others need."""
