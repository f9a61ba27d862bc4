"""Gymnasium's Taxi: fetch a passenger and bring him to his place. The table is the environment's own, ``P``."""

from __future__ import annotations

import torch
from torch.nn.functional import one_hot

from verl_credit.study.exact_worlds.mdp import Mdp, drawn_tasks

IN_TAXI = 4
"""The passenger's place while the taxi carries him."""


def taxi(limit: int, unseen: int, count: int, seed: int) -> Mdp:
    """Tasks of the environment's one map, whose starts are its 300: the passenger waits, and not where he wants to go."""
    from gymnasium.envs.toy_text.taxi import TaxiEnv

    env = TaxiEnv()
    states = range(len(env.P))
    ways = [[env.P[state][action][0] for action in sorted(env.P[state])] for state in states]
    next_M_S_A = torch.tensor([[[after for _, after, _, _ in of_state] for of_state in ways]])
    solved_M_S_A = torch.tensor(
        [[[ends and earned > 0 for _, _, earned, ends in of_state] for of_state in ways]]
    )
    parts_S_4 = torch.tensor([list(env.decode(state)) for state in states])
    row_S, column_S, passenger_S, goal_S = parts_S_4.T
    passenger_S_5 = one_hot(passenger_S, 5)
    places = [one_hot(row_S, 5), one_hot(column_S, 5)]
    by_passenger = [torch.einsum("si,sj->sij", passenger_S_5, place).flatten(1) for place in places]
    x_S_F = torch.cat([*places, passenger_S_5, one_hot(goal_S, 4), *by_passenger], dim=1).float()
    starts_n = ((passenger_S != IN_TAXI) & (passenger_S != goal_S)).nonzero().flatten()
    drawn = torch.randint(
        len(starts_n), (100 * (unseen + count),), generator=torch.Generator().manual_seed(seed)
    )
    start_Q = torch.tensor(drawn_tasks(lambda number: int(starts_n[drawn[number]]), unseen, count))
    return Mdp(
        next_M_S_A,
        solved_M_S_A,
        x_S_F,
        torch.arange(len(x_S_F))[None],
        (passenger_S == IN_TAXI).double()[None],
        torch.zeros_like(start_Q),
        start_Q,
        limit,
        unseen,
    )
