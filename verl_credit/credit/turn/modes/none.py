"""none: the outcome's advantage for every turn."""

from collections.abc import Callable

import torch

from verl_credit.credit.groups import EPS
from verl_credit.credit.operator import (
    CENTRED,
    NORMALISED,
    AtLeastZero,
    Count,
    Positive,
    WithoutGains,
    refuse_unread,
)
from verl_credit.credit.turn.mode import ModeOutput, TurnMode
from verl_credit.credit.turn.tables import Tables


def none(
    tables: Tables,
    *,
    outcome_scale: AtLeastZero = 1.0,
    outcome_operator: str | Callable[..., torch.Tensor] = "grpo",
    norm_by_std: bool = True,
    ddof: Count = 1,
    variance_floor: AtLeastZero = 0.0,
    eps: Positive = EPS,
) -> ModeOutput:
    """Gives every turn the outcome's advantage, by default GRPO's with verl's constants, and reads no turn rewards.

        A_k = R for every turn

    Other outcome operators have no constants: norm_by_std does nothing to them, and the others are refused beside them.
    """
    if outcome_operator != "grpo":
        unread = {"ddof": (ddof, 1), "variance_floor": (variance_floor, 0.0), "eps": (eps, EPS)}
        label = getattr(outcome_operator, "__name__", repr(outcome_operator))
        refuse_unread(f"outcome_operator={label}", "only grpo reads it", **unread)
    norm = {"norm_by_std": norm_by_std, "ddof": ddof, "variance_floor": variance_floor, "eps": eps}
    outcome_B = outcome_scale * tables.outcome_advantage(outcome_operator, **norm)
    return outcome_B[:, None].expand_as(tables.reward_B_K), outcome_B, tables.ones()


NONE = TurnMode(
    name="none",
    function=none,
    reads=("rewards", "groups"),
    reduces_to="the outcome operator alone",
    bias="that of the outcome operator",
    source="2402.03300",
    properties=CENTRED | NORMALISED,
    without_gains=WithoutGains(lambda n: 1.0),
)
