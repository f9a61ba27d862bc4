"""The warning about groups per prompt and turn that are too small to compare a turn with."""

from __future__ import annotations

from collections.abc import Mapping

from verl_credit.credit.turn.mode import TurnMode

NOTED_SHARE = 0.25
"""Share of a step's groups per prompt and tool turn."""


def small_groups_note(mode: TurnMode, metrics: Mapping[str, float], step: int, n: int) -> str | None:
    """A warning if more than ``NOTED_SHARE`` of the groups of the step have one member or two."""
    groups, one, two = (metrics.get(f"credit/turn_groups{kind}", 0) for kind in ("", "_of_one", "_of_two"))
    if not mode.per_turn or one + two <= NOTED_SHARE * groups:
        return None
    return (
        f"warning: in step {step} {(one + two) / groups:.0%} of the groups per prompt and turn have one member ({one:g}, "
        f"its turn gets 0) or two ({two:g}, of which any difference, however small, gives +1 and -1). Raise "
        f"actor_rollout_ref.rollout.n (now {n}), allow fewer turns (search.max_searches), or set "
        "algorithm.info_gain_norm_mode=leave_one_out, in which every trajectory is a member of every turn"
    )
