"""Learning curves in the chain world, R runs side by side. Success is exact, over all questions.

"learned, lam": `turn_gae` with V by a ridge that has not seen the prompt. Its features are those of a group (mean outcome of
the prompt's other rollouts, and turn), the hops done and the searches wasted. It is fitted to this step and the four before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch.nn.functional import normalize, one_hot

from verl_credit.credit.turn.values import States, crossfit, explained_variance, group_features, loo_mean
from verl_credit.study.exact_worlds.chain_credit import OUTCOMES
from verl_credit.study.exact_worlds.chain_world import (
    PRIVATE,
    QUESTIONS,
    WASTED,
    Paths,
    first_policy,
    roll,
    values,
)

Give = Callable[["Learning", Paths, torch.Tensor], torch.Tensor]
"""(the learning runs, a step's trajectories, V of their states) -> an advantage per turn, [B, K1]."""


def outcome_credit(name: str) -> Give:
    return lambda runs, paths, value_B_K1: paths.credit(**OUTCOMES[name])


def true_credit(lam: float, negative: float = 1.0) -> Give:
    return lambda runs, paths, value_B_K1: paths.credit("turn_gae", value_B_K1, lam=lam, negative=negative)


def learned_credit(lam: float, negative: float = 1.0) -> Give:
    def give(runs: Learning, paths: Paths, value_B_K1: torch.Tensor) -> torch.Tensor:
        fitted_B_K1 = runs.learned_values(paths)
        runs.explained.append(explained_variance(fitted_B_K1[paths.turn_B_K1], value_B_K1[paths.turn_B_K1]))
        return paths.credit("turn_gae", fitted_B_K1, lam=lam, negative=negative)

    return give


class Learning:
    """R runs, each with a world of ``pool`` questions and an order of its own; the seed gives every credit the same ones.

    A step asks 16 questions 8 times and makes 4 updates of 4 questions. An update is ``rate`` long, with momentum, so that
    credits differ by their direction alone.
    """

    def __init__(self, hops: int, runs: int, seed: int, *, pool: int = 320, rate: float = 0.15):
        self._random = torch.Generator().manual_seed(seed)
        self._runs, self._pool, self._rate, self._updates = runs, pool, rate, 0
        self._base = first_policy(hops, runs, pool, self._random).view(runs, pool, hops + 1, WASTED, 3)
        self._shared, self._private = (
            torch.zeros(runs, 1, hops + 1, 1, 3).double(),
            torch.zeros_like(self._base),
        )
        self._momentum = [torch.zeros_like(self._shared), torch.zeros_like(self._base)]
        self._order = torch.stack([torch.randperm(pool, generator=self._random) for _ in range(runs)])
        self._replay: deque[list[States]] = deque(maxlen=4)
        self.explained: list[float] = []
        """The share of the true values' variance that learned ones explain, by step."""

    def success(self) -> torch.Tensor:
        """The exact chance of a right answer over all questions, [R]."""
        return values(self._prob().flatten(0, 1))[0][:, 0, 0].view(self._runs, -1).mean(1)

    def step(self, give: Give) -> None:
        first = self._updates // 4 * QUESTIONS
        self._asked = self._order[:, torch.arange(first, first + QUESTIONS) % self._pool]
        prob_N_P_W_A = self._asked_prob()
        paths = roll(prob_N_P_W_A, self._random)
        credit_B_K1 = give(self, paths, paths.of_states(values(prob_N_P_W_A)[0]))
        part_B = paths.question_B % QUESTIONS // 4
        for part in range(4):
            own_B_K1 = torch.where((part_B == part)[:, None], credit_B_K1, 0.0)
            self._update(paths.gradient(self._asked_prob(), own_B_K1, self._runs))

    def _prob(self) -> torch.Tensor:
        return (self._base + self._shared + PRIVATE * self._private).softmax(-1)

    def _asked_prob(self) -> torch.Tensor:
        return self._prob()[torch.arange(self._runs)[:, None], self._asked].flatten(0, 1)

    def _update(self, gradient_R_D: torch.Tensor) -> None:
        self._updates += 1
        unit_R_D = normalize(gradient_R_D, dim=1)  # no gradient: no step
        shared, private = unit_R_D.split(
            [self._shared[0].numel(), unit_R_D.shape[1] - self._shared[0].numel()], 1
        )
        whole = torch.zeros_like(self._private)
        whole[torch.arange(self._runs)[:, None], self._asked] = private.view(
            self._runs, QUESTIONS, *whole.shape[2:]
        )
        step = self._rate / (1 - 0.9**self._updates)
        for weight, momentum, now in zip(
            (self._shared, self._private), self._momentum, (shared.view_as(self._shared), whole), strict=True
        ):
            momentum.mul_(0.9).add_(0.1 * now)
            weight.add_(step * momentum)

    def learned_values(self, paths: Paths) -> torch.Tensor:
        """V before each turn, [B, K1], run by run; 0 after a row's last turn."""
        turn_B_K1, run_B = paths.turn_B_K1, paths.question_B // QUESTIONS
        mean_B = loo_mean(paths.outcome_B, paths.question_B, torch.ones_like(run_B, dtype=torch.bool))
        seen = one_hot(paths.place_B_K1, paths.hops + 1), one_hot(paths.wasted_B_K1, WASTED + 1)
        x_B_K1_D = torch.cat([group_features(mean_B, paths.hops + 3), *seen], dim=2).double()
        asked_B = self._asked.flatten()[paths.question_B]
        value_B_K1, states = torch.zeros(turn_B_K1.shape, dtype=torch.float64), []
        for run in range(self._runs):
            here = turn_B_K1 & (run_B == run)[:, None]
            outcome, asked, mean = (
                x.expand_as(turn_B_K1.T).T[here] for x in (paths.outcome_B, asked_B, mean_B)
            )
            states.append(States(x_B_K1_D[here], outcome, asked))
            before = [step[run] for step in self._replay]
            replay = States.joined(before) if before else None
            value_B_K1[here], _ = crossfit(states[-1], replay, mean, shrink=0.01, folds=8)
        self._replay.append(states)
        return value_B_K1


CREDITS: dict[str, Give] = {
    **{name: outcome_credit(name) for name in OUTCOMES},
    "A*": true_credit(0.0),
    "A*, halved": true_credit(0.0, 0.5),
    "true values, lam 0.5": true_credit(0.5),
    "learned, lam 0": learned_credit(0.0),
    "learned, lam 0.5": learned_credit(0.5),
    "learned, lam 0.8": learned_credit(0.8),
    "learned, lam 1": learned_credit(1.0),
    "learned, lam 0.5, halved": learned_credit(0.5, 0.5),
    "learned, lam 0.8, halved": learned_credit(0.8, 0.5),
}


def curve(
    name: str, hops: int, runs: int, steps: int, seed: int = 0, **options
) -> tuple[torch.Tensor, list[float]]:
    """(success after each step, [steps, R]; what learned values explain, by step)."""
    learning = Learning(hops, runs, seed, **options)
    success = []
    for _ in range(steps):
        learning.step(CREDITS[name])
        success.append(learning.success())
    return torch.stack(success), learning.explained
