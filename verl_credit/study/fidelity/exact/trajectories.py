"""Every trajectory of a question with its probability; V, Q and A* of every turn by dynamic programming."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from verl_credit.credit import info_gain
from verl_credit.study.fidelity.exact.question import Choices, Question, list_choices


@dataclass(frozen=True)
class Trajectories:
    """N trajectories, K1 = the question's turns. A path whose answer may be right or wrong stands here twice."""

    choices: Choices
    choice_N_K1: torch.Tensor
    """The choice of each turn; -1 past the answer."""
    outcome_N: torch.Tensor
    """0 or 1."""
    chance_N: torch.Tensor
    """Probability of the outcome, given the path."""

    @property
    def turn_N_K1(self) -> torch.Tensor:
        """The turns that a trajectory has, its answer included."""
        return self.choice_N_K1 >= 0

    @property
    def n_turns_N(self) -> torch.Tensor:
        return self.turn_N_K1.sum(1)

    @property
    def state_N_K1(self) -> torch.Tensor:
        """The state before each turn; -1 past the answer."""
        return torch.where(self.turn_N_K1, self.choices.state_D[self.choice_N_K1], -1)

    @property
    def potential_N_K1(self) -> torch.Tensor:
        """The potential before each turn; 1 past the answer, where nothing reads it."""
        places = self.choices.question.places
        potential_S = [places[name].potential for name, _ in self.choices.states]
        potential_S = torch.tensor([*potential_S, 1.0], dtype=torch.float64)  # place -1
        return potential_S[self.state_N_K1]

    @property
    def gain_N_K(self) -> torch.Tensor:
        """Information gain of each search: the potential after it minus the potential before it; 0 past the searches."""
        return info_gain(self.potential_N_K1.log(), self.turn_N_K1).info_gain_B_K

    def turn_log_prob_N_K1(self, logits_D: torch.Tensor) -> torch.Tensor:
        """log pi of each turn's choice; 0 past the answer. Differentiable."""
        return torch.where(self.turn_N_K1, self.choices.log_prob_D(logits_D)[self.choice_N_K1], 0.0)

    def probability_N(self, logits_D: torch.Tensor) -> torch.Tensor:
        """p = chance of the outcome x product over turns of pi; sums to 1. Differentiable."""
        return self.chance_N * self.turn_log_prob_N_K1(logits_D).sum(1).exp()

    def score_N_K1_D(self, logits_D: torch.Tensor) -> torch.Tensor:
        """The gradient of each turn's log pi; 0 past the answer."""
        score_D_D = self.choices.score_D_D(logits_D)
        return torch.where(self.turn_N_K1[..., None], score_D_D[self.choice_N_K1], 0.0)


def list_trajectories(question: Question) -> Trajectories:
    """All of them, in the order of a depth-first walk."""
    choices = list_choices(question)
    rows = []
    for path in _paths(choices, 0):
        name, _ = choices.states[choices.state_D[path[-1]]]
        success = question.places[name].success
        padded = path + [-1] * (question.turns - len(path))
        rows += [(padded, r, p) for r, p in ((1.0, success), (0.0, 1 - success)) if p > 0]
    chosen, outcome, chance = zip(*rows, strict=True)
    return Trajectories(
        choices, torch.tensor(chosen), torch.tensor(outcome, dtype=torch.float64),
        torch.tensor(chance, dtype=torch.float64),
    )  # fmt: skip


def _paths(choices: Choices, state: int) -> Iterator[list[int]]:
    for number in (choices.state_D == state).nonzero().flatten().tolist():
        to = int(choices.next_D[number])
        for rest in [[]] if to < 0 else _paths(choices, to):
            yield [number, *rest]


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

    The chance of the outcome is assigned to the answer. A trajectory's A* sum to r - V(s_0).
    """
    before_N_K1 = turn_values(trajectories, logits_D)
    after_N_K1 = torch.nn.functional.pad(before_N_K1[:, 1:], (0, 1))
    ends_N_K1 = torch.arange(before_N_K1.shape[1]) == trajectories.n_turns_N[:, None] - 1
    after_N_K1 = torch.where(ends_N_K1, trajectories.outcome_N[:, None], after_N_K1)
    return torch.where(trajectories.turn_N_K1, after_N_K1 - before_N_K1, 0.0)
