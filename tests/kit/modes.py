"""Options for tests that run every turn mode."""

from verl_credit.credit import MODES


def read_by(mode: str, **options) -> dict:
    """``info_gain_norm_mode`` and those of the options that the mode reads; it refuses the others."""
    known = {name: value for name, value in options.items() if name in MODES[mode].options}
    return {"info_gain_norm_mode": mode, **known}
