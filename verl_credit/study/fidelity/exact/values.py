"""V, Q and A* of every turn by dynamic programming."""

from __future__ import annotations

import torch

from verl_credit.study.fidelity.exact.policy import Choices
from verl_credit.study.fidelity.exact.trajectories import Trajectories


def values(choices: Choices, logits_D: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(V per state, Q per choice), the expected outcome from there on.

    Q(s, stop) = success at s        Q(s, search) = V(next)        V(s) = sum over actions of pi Q
    """
    places = choices.question.places
    success_S = torch.tensor([places[name].success for name, _ in choices.states], dtype=torch.float64)
    pi_D = choices.log_prob_D(logits_D).exp()
    value_S, q_D = torch.zeros(len(choices.states), dtype=torch.float64), torch.zeros_like(pi_D)
    for state in reversed(range(len(choices.states))):  # a search leads to a later state
        own_D = choices.state_D == state
        after_D = torch.where(choices.next_D < 0, success_S[state], value_S[choices.next_D])
        q_D = torch.where(own_D, after_D, q_D)
        value_S[state] = (pi_D * after_D)[own_D].sum()
    return value_S, q_D


def turn_values(trajectories: Trajectories, logits_D: torch.Tensor) -> torch.Tensor:
    """V before each turn, [N, K1]; 0 past the answer."""
    value_S, _ = values(trajectories.choices, logits_D)
    return torch.where(trajectories.turn_N_K1, value_S[trajectories.state_N_K1], 0.0)


def true_advantages(trajectories: Trajectories, logits_D: torch.Tensor) -> torch.Tensor:
    """A* of each turn, [N, K1]; 0 past the answer.

        search: V(s_{k+1}) - V(s_k)        answer: r - V(s_n)

    The chance of the outcome counts as the answer's. A trajectory's A* sum to r - V(s_0).
    """
    before_N_K1 = turn_values(trajectories, logits_D)
    after_N_K1 = torch.nn.functional.pad(before_N_K1[:, 1:], (0, 1))
    ends_N_K1 = torch.arange(before_N_K1.shape[1]) == trajectories.n_turns_N[:, None] - 1
    after_N_K1 = torch.where(ends_N_K1, trajectories.outcome_N[:, None], after_N_K1)
    return torch.where(trajectories.turn_N_K1, after_N_K1 - before_N_K1, 0.0)
