"""Learning in the chain world, R runs side by side. Success is exact, over all questions."""

from __future__ import annotations

import torch
from torch.nn.functional import normalize

from verl_credit.study.exact_worlds.chain_world import PRIVATE, WASTED, Paths, first_policy, roll, values
from verl_credit.study.exact_worlds.learning import ROLLOUTS, UPDATES, Credit


class ChainLearning:
    """R runs, each with a world of ``pool`` questions and an order of its own; the seed gives every credit the same ones.

    A step asks 128 / ``group`` questions ``group`` times and makes 4 updates, each of a quarter of the questions. An
    update is ``rate`` long, with momentum, so that credits differ by their direction alone.
    """

    def __init__(
        self, hops: int, runs: int, seed: int, *, group: int = 8, pool: int = 320, rate: float = 0.15
    ):
        self._random = torch.Generator().manual_seed(seed)
        self._runs, self._pool, self._rate, self._updates = runs, pool, rate, 0
        self._group, self._questions = group, ROLLOUTS // group
        self._base = first_policy(hops, runs, pool, self._random).view(runs, pool, hops + 1, WASTED, 3)
        self._shared, self._private = (
            torch.zeros(runs, 1, hops + 1, 1, 3).double(),
            torch.zeros_like(self._base),
        )
        self._momentum = [torch.zeros_like(self._shared), torch.zeros_like(self._base)]
        self._order = torch.stack([torch.randperm(pool, generator=self._random) for _ in range(runs)])

    def success(self) -> torch.Tensor:
        """The exact chance of a right answer over all questions, [R]."""
        prob_N_P_W_A = self._prob(self._base, self._private).flatten(0, 1)
        return values(prob_N_P_W_A)[0][:, 0, 0].view(self._runs, -1).mean(1)

    def step(self, credit: Credit) -> None:
        first = self._updates // UPDATES * self._questions
        self._asked = self._order[:, torch.arange(first, first + self._questions) % self._pool]
        prob_N_P_W_A = self._asked_prob()
        paths = roll(prob_N_P_W_A, self._random, self._group)
        rolled = paths.rolled(values(prob_N_P_W_A)[0], self._questions, self._asked.flatten())
        credit_B_K1 = credit(rolled)
        part_B = paths.question_B % self._questions * UPDATES // self._questions
        for part in range(UPDATES):
            own_B_K1 = torch.where((part_B == part)[:, None], credit_B_K1, 0.0)
            self._update(paths, own_B_K1)

    def _prob(self, base: torch.Tensor, private: torch.Tensor) -> torch.Tensor:
        return (base + self._shared + PRIVATE * private).softmax(-1)

    def _asked_prob(self) -> torch.Tensor:
        asked = torch.arange(self._runs)[:, None], self._asked
        return self._prob(self._base[asked], self._private[asked]).flatten(0, 1)

    def _update(self, paths: Paths, credit_B_K1: torch.Tensor) -> None:
        self._updates += 1
        gradient_R_D = paths.gradient(self._asked_prob(), credit_B_K1, self._runs)
        unit_R_D = normalize(gradient_R_D, dim=1)  # no gradient: no step
        shared, private = unit_R_D.split(
            [self._shared[0].numel(), unit_R_D.shape[1] - self._shared[0].numel()], 1
        )
        whole = torch.zeros_like(self._private)
        whole[torch.arange(self._runs)[:, None], self._asked] = private.view(
            self._runs, self._questions, *whole.shape[2:]
        )
        step = self._rate / (1 - 0.9**self._updates)
        for weight, momentum, now in zip(
            (self._shared, self._private), self._momentum, (shared.view_as(self._shared), whole), strict=True
        ):
            momentum.mul_(0.9).add_(0.1 * now)
            weight.add_(step * momentum)
