"""separate: a prompt's outcomes and its gains have each their own mean and std (IGPO)."""

from verl_credit.credit.operator import CENTRED, NORMALISED
from verl_credit.credit.turn.mode import ModeOutput, TurnMode
from verl_credit.credit.turn.tables import Tables


def separate(tables: Tables) -> ModeOutput:
    """A_k = z(gain_k) + gamma A_{k+1}, A_answer = R, with z over the gains of all turns of the prompt."""
    group_B_K = tables.group_B[:, None].expand_as(tables.gain_B_K)
    z = tables.z_score(tables.gain_B_K.flatten(), group_B_K.flatten(), tables.has_gain_B_K.flatten())
    return tables.discounted(z.view_as(tables.gain_B_K), tables.outcome_advantage())


MODE = TurnMode(
    name="separate",
    function=separate,
    equation="A_k = z(gain_k) + gamma A_(k+1) with z over all gains of the prompt; A_answer = R",
    reduces_to="none, when there are no gains",
    bias="all turns share one mean",
    source="2510.14967",
    properties=CENTRED | NORMALISED,
)
