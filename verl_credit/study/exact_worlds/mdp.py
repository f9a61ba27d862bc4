"""Environments as tables: from the table of an environment the success of a policy is exact, and needs no rollouts.

Shapes: M maps, S states of a map, A actions, Q tasks, U distinct rows of features, R policies side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch

from verl_credit.worlds.doorkey.moves import Move


@dataclass(frozen=True)
class Mdp:
    """Tasks of an environment. A task is a map and the state in which it starts. It ends when it is solved, which earns 1,
    or after ``limit`` decisions. States with equal features share a row of ``x_U_F``."""

    next_M_S_A: torch.Tensor
    solved_M_S_A: torch.Tensor
    """True where the action solves the task, which then ends."""
    x_U_F: torch.Tensor
    """What a policy sees, float32."""
    seen_M_S: torch.Tensor
    """The row of ``x_U_F`` that a state shows."""
    progress_M_S: torch.Tensor
    """How far a state is, from 0 to 1, as the user's loop can see it. It is not made of the outcome."""
    map_Q: torch.Tensor
    start_Q: torch.Tensor
    limit: int
    unseen: int
    """The first so many tasks are asked for the exact success alone; no other task is equal to one of them."""

    @property
    def actions(self) -> int:
        return self.next_M_S_A.shape[2]

    def values(self, prob_R_U_A: torch.Tensor, map_m: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yields V [R, m, S] of the maps ``map_m`` with 1, 2, ..., ``limit`` decisions left.

        V_0 = 0,  V_j(s) = sum over a of pi(a | s) (1 if a solves s, else V_(j-1)(the next state))
        """
        prob_R_m_S_A = prob_R_U_A.double()[:, self.seen_M_S[map_m]]
        solved_m_S_A = self.solved_M_S_A[map_m]
        earned_R_m_S = (prob_R_m_S_A * solved_m_S_A).sum(-1)
        going_R_m_S_A = torch.where(solved_m_S_A, 0.0, prob_R_m_S_A)
        first_m = torch.arange(len(map_m))[:, None, None] * self.next_M_S_A.shape[1]
        next_N = (first_m + self.next_M_S_A[map_m]).flatten()
        value_R_m_S = torch.zeros_like(earned_R_m_S)
        for _ in range(self.limit):
            after_R_m_S_A = value_R_m_S.flatten(1)[:, next_N].view_as(going_R_m_S_A)
            value_R_m_S = earned_R_m_S + (going_R_m_S_A * after_R_m_S_A).sum(-1)
            yield value_R_m_S

    def success(self, prob_R_U_A: torch.Tensor) -> torch.Tensor:
        """The exact chance to solve an unseen task, mean over them, [R]."""
        map_m, place_q = self.map_Q[: self.unseen].unique(return_inverse=True)
        *_, value_R_m_S = self.values(prob_R_U_A, map_m)
        return value_R_m_S[:, place_q, self.start_Q[: self.unseen]].mean(1)

    def visits(self, prob_M_S_A: torch.Tensor) -> torch.Tensor:
        """The expected number of visits of each state, summed over all tasks that are not unseen, [M, S]."""
        maps, states = self.seen_M_S.shape
        start_q = (self.map_Q * states + self.start_Q)[self.unseen :]
        here_N = start_q.bincount(minlength=maps * states).double()
        first_M = torch.arange(maps)[:, None, None] * states
        next_N_A = (first_M + self.next_M_S_A).flatten(0, 1)
        going_N_A = torch.where(self.solved_M_S_A, 0.0, prob_M_S_A.double()).flatten(0, 1)
        visits_N = torch.zeros_like(here_N)
        for _ in range(self.limit):
            visits_N += here_N
            moved_N_A = here_N[:, None] * going_N_A
            here_N = torch.zeros_like(here_N).index_add_(0, next_N_A.flatten(), moved_N_A.flatten())
        return visits_N.view(maps, states)

    def best_actions(self) -> torch.Tensor:
        """The policy [M, S, A] that takes each of the shortest ways equally often; 0 in a state without a way."""
        far = torch.iinfo(torch.long).max // 2
        map_M_1_1 = torch.arange(len(self.next_M_S_A))[:, None, None]
        distance_M_S, before = torch.full(self.seen_M_S.shape, far), None
        while before is None or not torch.equal(before, distance_M_S):
            before = distance_M_S
            after_M_S_A = torch.where(self.solved_M_S_A, 0, distance_M_S[map_M_1_1, self.next_M_S_A])
            distance_M_S = (1 + after_M_S_A.amin(-1)).clamp(max=far)
        best_M_S_A = (1 + after_M_S_A == distance_M_S[..., None]) & (distance_M_S < far)[..., None]
        return best_M_S_A / best_M_S_A.sum(-1, keepdim=True).clamp(min=1)


def tables_of(
    maps: Sequence[dict[Hashable, list[Move]]],
    x: Callable[[int, Hashable], torch.Tensor],
    progress: Callable[[int, Hashable], float],
    tasks: Sequence[tuple[int, Hashable]],
    *,
    limit: int,
    unseen: int,
) -> Mdp:
    """The `Mdp` of maps that `walk` found. ``x`` and ``progress`` get a map's number and a state; a task is (map, start)."""
    places = [{state: place for place, state in enumerate(of_map)} for of_map in maps]
    states, actions = max(map(len, maps)), len(next(iter(maps[0].values())))
    next_M_S_A = torch.arange(states)[:, None].repeat(len(maps), 1, actions)  # padding leads to itself
    solved_M_S_A = torch.zeros(next_M_S_A.shape, dtype=torch.bool)
    progress_M_S = torch.zeros(len(maps), states, dtype=torch.float64)
    x_N, at_N = [], []
    for m, of_map in enumerate(maps):
        for s, (state, moves) in enumerate(of_map.items()):
            next_M_S_A[m, s] = torch.tensor([s if solved else places[m][after] for after, solved in moves])
            solved_M_S_A[m, s] = torch.tensor([solved for _, solved in moves])
            progress_M_S[m, s] = progress(m, state)
            x_N.append(x(m, state))
            at_N.append((m, s))
    x_U_F, row_N = torch.stack(x_N).float().unique(dim=0, return_inverse=True)
    seen_M_S = torch.zeros(progress_M_S.shape, dtype=torch.long)
    seen_M_S[tuple(torch.tensor(at_N).T)] = row_N
    map_Q = torch.tensor([m for m, _ in tasks])
    start_Q = torch.tensor([places[m][start] for m, start in tasks])
    return Mdp(next_M_S_A, solved_M_S_A, x_U_F, seen_M_S, progress_M_S, map_Q, start_Q, limit, unseen)


def drawn_tasks(draw: Callable[[int], Hashable], unseen: int, count: int) -> list[Hashable]:
    """``unseen`` tasks, then ``count`` more, none of which is one of these. ``draw``: the task of a number."""
    first: list[Hashable] = []
    number = 0
    while len(first) < unseen:
        if (task := draw(number)) not in first:
            first.append(task)
        number += 1
    held_out, others = set(first), []
    while len(others) < count:
        if (task := draw(number)) not in held_out:
            others.append(task)
        number += 1
    return first + others
