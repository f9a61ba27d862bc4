"""The warnings of a step that are hard to see in its metrics: turns that are cut, small groups, rows left out."""

from __future__ import annotations

from collections.abc import Mapping

from verl_credit.credit.turn.mode import TurnMode

TURNS_CUT_SHARE = 0.05
"""Share of a step's turns. Above it the budget, and not the policy, decides many outcomes."""
TURNS_CUT = "credit/turns_cut"


def cut_note(share: float, step: int, budget: int) -> str | None:
    """A warning if more than ``TURNS_CUT_SHARE`` of the step's turns were cut before their call or answer was complete."""
    if share <= TURNS_CUT_SHARE:
        return None
    return (
        f"warning: in step {step} {share:.0%} of the turns were cut at search.max_new_tokens={budget} before a call or an "
        "answer was complete (credit/stop/turn_length); such rows end without an answer. Raise search.max_new_tokens and "
        "data.max_response_length, which has to hold all turns; or, if the model thinks first and its chat template can "
        "switch that off, set +data.apply_chat_template_kwargs.enable_thinking=false"
    )


SMALL_GROUPS_SHARE = 0.25
"""Share of a step's groups per prompt and tool turn."""


def small_groups_note(mode: TurnMode, metrics: Mapping[str, float], step: int, n: int) -> str | None:
    """A warning if more than ``SMALL_GROUPS_SHARE`` of the groups of the step have one member or two."""
    groups, one, two = (metrics.get(f"credit/turn_groups{kind}", 0) for kind in ("", "_of_one", "_of_two"))
    if not mode.per_turn or one + two <= SMALL_GROUPS_SHARE * groups:
        return None
    return (
        f"warning: in step {step} {(one + two) / groups:.0%} of the groups per prompt and turn have one member ({one:g}, "
        f"its turn gets 0) or two ({two:g}, of which any difference, however small, gives +1 and -1). Raise "
        f"actor_rollout_ref.rollout.n (now {n}), allow fewer turns (search.max_searches), or set "
        "algorithm.info_gain_norm_mode=leave_one_out, in which every trajectory is a member of every turn"
    )


LEFT_OUT_SHARE = 0.25
"""Share of a step's rows that count."""
ROWS_LEFT_OUT = "credit/rows_left_out"


def left_out_note(share: float, step: int, mode: str) -> str | None:
    """A warning if more than ``LEFT_OUT_SHARE`` of the step's rows read only their outcome. ``mode``: the turn mode."""
    if share <= LEFT_OUT_SHARE:
        return None
    return (
        f"warning: in step {step} {share:.0%} of the rows are left out of the turn level: "
        f"algorithm.info_gain_norm_mode={mode} compares whole returns, and a tool turn of these rows has no reward, or lost "
        "it (credit/signal/NAME/without, /lost). They read their outcome's advantage alone. Give 0 for a turn that earned "
        "nothing, or set a mode that compares single turns, such as turn-group-v1d"
    )
