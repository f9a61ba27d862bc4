"""The turn modes: how outcome and information gain become an advantage per turn."""

from verl_credit.credit.turn.mode import TurnMode
from verl_credit.credit.turn.modes import gigpo, graph, joint, mt_grpo, progress, turn_group

MODES: dict[str, TurnMode] = {vars(function)["mode"].name: vars(function)["mode"] for function in (
    joint.none, joint.joint, joint.separate,
    turn_group.turn_group, turn_group.turn_group_v1d, turn_group.turn_group_unbiased, turn_group.leave_one_out,
    gigpo.gigpo, gigpo.hgpo, graph.g2po,
    mt_grpo.mt_grpo, progress.progress, progress.turn_gae,
)}  # fmt: skip


def modes_that(allow: str) -> str:
    """``modes_that("scales_clip")``: their names, for a message."""
    return ", ".join(name for name, mode in MODES.items() if getattr(mode, allow))
