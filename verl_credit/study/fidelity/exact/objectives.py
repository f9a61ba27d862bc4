"""Objectives of modes as differentiable functions of the policy, and their exact gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from verl_credit.study.fidelity.exact.trajectories import Trajectories


@dataclass(frozen=True)
class Expected:
    """Expectations over a question's trajectories: scalars with a gradient, if the probabilities have one."""

    trajectories: Trajectories
    probability_N: torch.Tensor

    @property
    def reward(self) -> torch.Tensor:
        return (self.probability_N * self.trajectories.outcome_N).sum()

    @property
    def turns(self) -> torch.Tensor:
        """The answer included."""
        return (self.probability_N * self.trajectories.n_turns_N).sum()

    def gain(self, gamma: float = 1.0) -> torch.Tensor:
        """E[sum over turns k = 0, 1, ... of gamma^k gain_k]."""
        gain_N_K = self.trajectories.gain_N_K
        return (self.probability_N * (gain_N_K @ gamma ** torch.arange(gain_N_K.shape[1]).double())).sum()


Objective = Callable[[Expected, int], torch.Tensor]
"""(expectations of a question, rollouts of a group) -> what is maximised there."""


def reward(expected: Expected, group_size: int) -> torch.Tensor:
    """J = E[r]."""
    return expected.reward


def gain(expected: Expected, group_size: int) -> torch.Tensor:
    """The expected sum of gains."""
    return expected.gain()


def fewer_turns(expected: Expected, group_size: int) -> torch.Tensor:
    return -expected.turns


def with_gain(alpha: float, gamma: float = 1.0) -> Objective:
    """E[r + alpha sum of gamma^k gain_k]."""
    return lambda expected, _: expected.reward + alpha * expected.gain(gamma)


def with_turn_penalty(penalty: float) -> Objective:
    """E[r] - penalty E[turns]."""
    return lambda expected, _: expected.reward - penalty * expected.turns


def log_success(expected: Expected, group_size: int) -> torch.Tensor:
    """log p, expanded at p = 1 and cut after n - 1 terms: -sum over k = 1 .. n - 1 of (1 - p)^k / k.

    With 0/1 outcomes the expected gradient of `maxrl` is this one's, but for its eps. The paper's estimator has n terms;
    subtracting 1 from every advantage of a group, and nothing where the group has no success, takes the last one away.
    Source: 2602.02710; derived anew for the centred form.
    """
    k = torch.arange(1, group_size, dtype=torch.float64)
    return -((1 - expected.reward) ** k / k).sum()


def arcsine(expected: Expected, group_size: int) -> torch.Tensor:
    """2 arcsin(sqrt(p)), whose gradient is grad p / sqrt(p (1 - p)): what dividing by the std tends to in large groups."""
    return 2 * expected.reward.sqrt().asin()


def gradient(
    objective: Objective, trajectories: Trajectories, logits_D: torch.Tensor, group_size: int
) -> torch.Tensor:
    """Exact gradient of the objective by autograd over all trajectories, [D]."""
    leaf_D = logits_D.clone().requires_grad_()
    return torch.autograd.grad(
        objective(Expected(trajectories, trajectories.probability_N(leaf_D)), group_size), leaf_D
    )[0]
