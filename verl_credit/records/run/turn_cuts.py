"""The warning about many turns that ``search.max_new_tokens`` cuts."""

from __future__ import annotations

NOTED_SHARE = 0.05
"""Share of a step's turns. Above it the budget, and not the policy, decides many outcomes."""
TURNS_CUT = "credit/turns_cut"


def cut_note(share: float, step: int, budget: int) -> str | None:
    """A warning if more than ``NOTED_SHARE`` of the step's turns were cut before their call or answer was complete."""
    if share <= NOTED_SHARE:
        return None
    return (
        f"warning: in step {step} {share:.0%} of the turns were cut at search.max_new_tokens={budget} before a call or an "
        "answer was complete (credit/stop/turn_length); such rows end without an answer. Raise search.max_new_tokens and "
        "data.max_response_length, which has to hold all turns; or, if the model thinks first and its chat template can "
        "switch that off, set +data.apply_chat_template_kwargs.enable_thinking=false"
    )
