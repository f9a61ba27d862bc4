"""none: the outcome's advantage for every turn."""

from verl_credit.credit.operator import CENTRED, NORMALISED, WithoutGains
from verl_credit.credit.turn.mode import ModeOutput, TurnMode
from verl_credit.credit.turn.tables import Tables


def none(tables: Tables) -> ModeOutput:
    """A_k = R for every turn: GRPO's outcome advantage. The gains are not read."""
    outcome_B = tables.outcome_advantage()
    return outcome_B[:, None].expand_as(tables.gain_B_K), outcome_B, tables.ones()


MODE = TurnMode(
    name="none",
    function=none,
    reads=("rewards", "groups"),
    equation="A_k = R for every turn",
    reduces_to="the outcome operator alone",
    bias="that of the outcome operator",
    source="2402.03300",
    properties=CENTRED | NORMALISED,
    without_gains=WithoutGains(lambda n: 1.0),
    ddof=1,
    variance_floor=0.0,
)
