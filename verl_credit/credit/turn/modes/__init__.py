"""The turn modes: how outcome and information gain become an advantage per turn. One file each."""

from collections.abc import Mapping
from types import MappingProxyType

from verl_credit.credit.turn.mode import TurnMode
from verl_credit.credit.turn.modes import (
    gigpo,
    hgpo,
    joint,
    leave_one_out,
    mt_grpo,
    none,
    progress,
    separate,
    turn_gae,
    turn_group,
    turn_group_unbiased,
    turn_group_v1d,
)

_MODULES = (
    none, joint, separate, turn_group, turn_group_v1d, turn_group_unbiased, leave_one_out,
    gigpo, hgpo, mt_grpo, progress, turn_gae,
)  # fmt: skip
MODES: Mapping[str, TurnMode] = MappingProxyType({module.MODE.name: module.MODE for module in _MODULES})


def modes_that(allow: str) -> str:
    """``modes_that("scales_clip")``: their names, for a message."""
    return ", ".join(name for name, mode in MODES.items() if getattr(mode, allow))
