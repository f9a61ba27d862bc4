"""joint: outcomes and gains of a prompt share one mean and std (IGPO)."""

import torch

from verl_credit.credit.turn.mode import ModeOutput, TurnMode
from verl_credit.credit.turn.tables import Tables


def joint(tables: Tables) -> ModeOutput:
    """A_k = z(gain_k) + gamma A_{k+1}, A_answer = z(r), with z over the prompt's outcomes and gains together.

    A tied group's answer turns do not get 0 here: its outcomes differ from the gains they are pooled with.
    """
    group_B_K = tables.group_B[:, None].expand_as(tables.gain_B_K)
    rows = tables.outcome_B.shape[0]
    z = tables.z_score(
        torch.cat([tables.outcome_B, tables.gain_B_K.flatten()]),
        torch.cat([tables.group_B, group_B_K.flatten()]),
        torch.cat([tables.valid_B, tables.has_gain_B_K.flatten()]),
    )
    return tables.discounted(z[rows:].view_as(tables.gain_B_K), tables.outcome_scale * z[:rows])


MODE = TurnMode(
    name="joint",
    function=joint,
    equation=(
        "z over outcomes and gains of a prompt together; A_k = z(gain_k) + gamma A_(k+1), A_answer = z(outcome)"
    ),
    reduces_to="none, when there are no gains",
    bias="gains and outcomes share a mean: long trajectories shift it",
    source="2510.14967",
    any_outcome_operator=False,
)
