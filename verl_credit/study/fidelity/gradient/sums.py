"""Credited gradients of a prompt's rollouts: what the statistics read, in place of turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from verl_credit.study.fidelity.credit import Advantages, per_turn
from verl_credit.study.fidelity.gradient.turns import TurnGradients
from verl_credit.study.fidelity.scored import ScoredTurn
from verl_credit.worlds.rollouts.rollout import Trajectory

Groups = Sequence[Sequence[Trajectory]]


@dataclass(frozen=True)
class PromptSums:
    """g_p = sum over the turns of prompt p of advantage x G, float64 [P, S].

    True advantages are noisy by their values, and turns of a prompt share values. Their sums therefore stand here twice, by
    each half of the continuations: the noise of one half is independent of the other's. Credit of a mode is the same twice.
    """

    first_P_S: np.ndarray
    second_P_S: np.ndarray
    held_out: bool = False
    """Made from the values' first half: on the same prompt only the second half of another sum is independent of it."""
    square_P: np.ndarray | None = None
    """|E[g_p | prompt]|^2, unbiased; see `square_of_means`."""

    @property
    def both_P_S(self) -> np.ndarray:
        return self.first_P_S if self.second_P_S is self.first_P_S else (self.first_P_S + self.second_P_S) / 2


def credited(
    groups: Groups, gradients: TurnGradients, advantages: Advantages, *, held_out: bool = False
) -> PromptSums:
    """Of a mode or a control."""
    sums_P_S = np.stack([rows.sum(0) for rows in _by_trajectory(groups, gradients, advantages)])
    return PromptSums(sums_P_S, sums_P_S, held_out)


def true_credit(groups: Groups, gradients: TurnGradients, turns: Sequence[ScoredTurn]) -> PromptSums:
    """Of A*:  E[sum over a prompt's n rollouts of A* x G] = n grad E[r].  ``turns`` are the groups', in order."""
    halves = [
        list(_by_trajectory(groups, gradients, per_turn(groups, [getattr(turn, name) for turn in turns])))
        for name in ("a_first", "a_second")
    ]
    squares = [square_of_means(first, second) for first, second in zip(*halves, strict=True)]
    first_P_S, second_P_S = (np.stack([rows.sum(0) for rows in half]) for half in halves)
    return PromptSums(first_P_S, second_P_S, square_P=np.array(squares))


def square_of_means(first_n_S: np.ndarray, second_n_S: np.ndarray) -> float:
    """|E[sum over n rollouts of x]|^2 of a prompt, unbiased, from each rollout's x by either half; NaN for one rollout.

        n / (n - 1) sum over i != j of x'_i . x''_j

    Neither a rollout's own noise is in it (i != j), nor that of a value which two rollouts share (two halves).
    """
    n = len(first_n_S)
    if n < 2:
        return float("nan")
    different = first_n_S.sum(0) @ second_n_S.sum(0) - (first_n_S * second_n_S).sum()
    return float(n / (n - 1) * different)


def tokens_of(groups: Groups) -> np.ndarray:
    """Tokens that the policy wrote in answer to each prompt, [P]."""
    return np.array(
        [sum(len(step.turn_ids) for path in group for step in path.steps) for group in groups], dtype=float
    )


def _by_trajectory(groups: Groups, gradients: TurnGradients, advantages: Advantages) -> Iterator[np.ndarray]:
    """Per prompt, the credited gradient of each of its n trajectories, float64 [n, S]."""
    for group, of_group in zip(groups, advantages, strict=True):
        yield np.stack(
            [
                np.asarray(of_path) @ gradients.sketch_N_S[[gradients.of(step) for step in path.steps]]
                for path, of_path in zip(group, of_group, strict=True)
            ]
        )
