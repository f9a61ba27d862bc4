"""The turn modes: how outcome and information gain become an advantage per turn."""

from verl_credit.credit.turn.mode import TurnMode
from verl_credit.credit.turn.modes.gigpo import GIGPO, HGPO
from verl_credit.credit.turn.modes.joint import JOINT, SEPARATE
from verl_credit.credit.turn.modes.mt_grpo import MT_GRPO
from verl_credit.credit.turn.modes.none import NONE
from verl_credit.credit.turn.modes.progress import PROGRESS
from verl_credit.credit.turn.modes.turn_gae import TURN_GAE
from verl_credit.credit.turn.modes.turn_group import (
    LEAVE_ONE_OUT,
    TURN_GROUP,
    TURN_GROUP_UNBIASED,
    TURN_GROUP_V1D,
)

MODES: dict[str, TurnMode] = {mode.name: mode for mode in (
    NONE, JOINT, SEPARATE, TURN_GROUP, TURN_GROUP_V1D, TURN_GROUP_UNBIASED, LEAVE_ONE_OUT,
    GIGPO, HGPO, MT_GRPO, PROGRESS, TURN_GAE,
)}  # fmt: skip


def modes_that(allow: str) -> str:
    """``modes_that("scales_clip")``: their names, for a message."""
    return ", ".join(name for name, mode in MODES.items() if getattr(mode, allow))
