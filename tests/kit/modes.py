"""Options for tests that run every turn mode."""

import torch

from verl_credit.credit import MODES


def read_by(mode: str, **options) -> dict:
    """``info_gain_norm_mode`` and those of the options that the mode reads; it refuses the others."""
    known = {name: value for name, value in options.items() if name in MODES[mode].options}
    return {"info_gain_norm_mode": mode, **known}


NO_TABLES = [name for name, mode in MODES.items() if not mode.needs]
"""For tests that bring outcomes and turn rewards alone. The laws, and `test_turn_methods`, bring what the others need."""


def batch(rewards, outcomes, group=None):
    """Positional tables and n_tool_turns_B of ragged tool rewards; None is a turn without a reward."""
    width = max(len(row) for row in rewards)
    full = [[*row, *[None] * (width - len(row))] for row in rewards]
    shape = len(rows := full), width
    reward = torch.tensor([[r or 0.0 for r in row] for row in rows], dtype=torch.float64).view(shape)
    mask = torch.tensor([[r is not None for r in row] for row in rows]).view(shape)
    outcome = torch.tensor(outcomes, dtype=torch.float64)
    group = torch.zeros(len(rows), dtype=torch.long) if group is None else torch.tensor(group)
    return (outcome, reward, mask, group), {"n_tool_turns_B": torch.tensor([len(row) for row in rewards])}
