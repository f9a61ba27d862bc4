"""turn_gae: generalised advantage estimation over turns, from values that the caller gives."""

import torch

from verl_credit.credit.operator import Share
from verl_credit.credit.turn.mode import ModeOutput, TurnMode
from verl_credit.credit.turn.tables import Tables


def turn_gae(tables: Tables, *, gamma: Share = 1.0, lam: Share = 1.0) -> ModeOutput:
    """Estimates advantages over turns from the values of their states.

        A_k = delta_k + gamma lam A_(k+1)
        delta_k = r_k + gamma V_(k+1) - V_k, the answer turn's r is the outcome

    V_k is the value of the state before turn k's response, V after the answer turn is bootstrap_B (0, if not given: a real
    end). Raw: no whitening; returns are A + V.
    A turn is one because the tables say so: a reward of exactly 0 is a reward (released code skips such turns).
    A turn that lost its reward and the turns before it get 0, because what they led to is not known. A turn that has none
    earns 0: rewards of different rows are not compared here, and the values expect what is earned.
    """
    bootstrap_B = torch.zeros_like(tables.outcome_B) if tables.bootstrap_B is None else tables.bootstrap_B
    value_B_K1 = torch.where(tables.turn_B_K1, tables.value_B_K1, 0.0)
    next_B_K1 = torch.nn.functional.pad(value_B_K1[:, 1:], (0, 1))
    next_B_K1 = torch.where(tables.is_answer_B_K1, bootstrap_B[:, None], next_B_K1)
    delta_B_K1 = tables.reward_B_K1() + gamma * next_B_K1 - value_B_K1
    delta_B_K1 = torch.where(tables.turn_B_K1, delta_B_K1, 0.0)
    advantage_B_K1 = tables.return_to_go(delta_B_K1, gamma * lam)
    lost_B_K1 = torch.nn.functional.pad(tables.lost_reward_B_K.long(), (0, 1))
    unknown_B_K1 = lost_B_K1.flip(1).cumsum(1).flip(1) > 0
    return *tables.split(torch.where(unknown_B_K1, 0.0, advantage_B_K1)), tables.ones()


NO_GROUP = "its baseline is the values, not the prompt's other trajectories"

TURN_GAE = TurnMode(
    name="turn_gae",
    function=turn_gae,
    reads=("rewards", "gains", "values"),
    needs=("value_B_K1",),
    reduces_to="G_k - V_k at lam 1, the turn's own delta at lam 0",
    bias="that of the values, at lam below 1",
    departures=(
        "turns with a reward of 0 are turns; a last turn with a reward of 0 is no error; a turn without a reward earns 0"
    ),
    source="1506.02438; RAGEN (mll-lab-nu/RAGEN) for turns",
    scope="row",
    exempt={"ties": NO_GROUP, "no_gains": NO_GROUP},
)
