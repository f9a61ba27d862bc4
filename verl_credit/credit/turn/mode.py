"""What a turn mode declares about itself.

A mode is one file in `modes/`: a function of `Tables` and a `TurnMode` that says what it reads and allows. Add the file,
and its entry in `modes/__init__.py`; configuration keys, checks, `explain` and docs/modes.md read the declaration.

The function returns `(advantage_B_K, outcome_advantage_B, clip_scale_B_K)` in float64. A turn without a gain of its own
belongs to the segment of the row's next gain: it reads that turn's advantage and clip scale, or the outcome's advantage
and 1 after the last gain (so do columns past a row's turns). `Tables.backward` does exactly this.
"""

from dataclasses import dataclass, field

import torch

from verl_credit.credit.groups import VARIANCE_FLOOR
from verl_credit.credit.operator import Operator, WithoutGains

ModeOutput = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class TurnMode(Operator):
    level: str = "turn"
    reads: tuple[str, ...] = ("rewards", "groups", "gains")
    departures: str = "none"
    any_outcome_operator: bool = True
    """False: the mode normalises outcomes itself and accepts ``grpo`` only."""
    scales_clip: bool = False
    """It gives turns a clip scale (`dynamic_clip`)."""
    reads_alpha: bool = False
    """`adv_rescale_alpha` weighs the gains."""
    curriculum: bool = True
    """Gains and outcomes can be weighed (`info_gain_curriculum`). False: the mode normalises their sum."""
    every_turn_needs_gain: bool = False
    """It needs `info_gain_first_turn=prior`, which gives the first tool turn a gain."""
    ddof: int = 0
    variance_floor: float = VARIANCE_FLOOR
    """Of the outcomes' std where the caller gives none: the release's; `none` has verl's."""
    without_gains: WithoutGains = field(default_factory=WithoutGains)
