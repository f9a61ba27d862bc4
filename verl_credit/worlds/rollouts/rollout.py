"""Whole trajectories from given states to their end, with every distinct context sampled once for all that reach it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from verl_credit.worlds.rollouts.protocol import Protocol, State, Step
from verl_credit.worlds.rollouts.sampler import Ask, Ids, TurnSampler, digest, uniforms


@dataclass(frozen=True)
class Start:
    """``count`` trajectories from ``state``. They depend only on ``seed``, ``name`` and the state."""

    state: State
    count: int
    seed: int
    name: str

    @cached_property
    def key(self) -> tuple[int, str, str]:
        return self.seed, self.name, digest(self.state.ids)


@dataclass(frozen=True)
class Trajectory:
    """The last step has the reward."""

    steps: list[Step]
    otherwise: bool = False
    """A tool answered otherwise on the way to the context in which the trajectory was to begin."""

    @property
    def reward(self) -> float:
        return self.steps[-1].reward


Groups = Sequence[Sequence[Trajectory]]
"""``[prompt][rollout]``."""
Node = tuple[State, list[tuple[int, int]]]
"""A context, and (start, number) of each trajectory that stands there."""
Roll = Callable[[Sequence[Start]], list[list[Trajectory]]]
"""The trajectories of every start."""


def _follow(protocol: Protocol, nodes: Sequence[Node], texts: Sequence[Sequence[Ids]]) -> list[list[Step]]:
    """The step after the text of each particle of each node: the same text has the same step."""
    distinct = {
        (state.ids, text): (state, text)
        for (state, _), of_node in zip(nodes, texts, strict=True)
        for text in of_node
    }
    step_of = dict(zip(distinct, protocol.steps(list(distinct.values())), strict=True))
    return [
        [step_of[state.ids, text] for text in of_node]
        for (state, _), of_node in zip(nodes, texts, strict=True)
    ]


def roll(sampler: TurnSampler, protocol: Protocol, starts: Sequence[Start]) -> list[list[Trajectory]]:
    """The trajectories of every start.

    Trajectories of all starts go through the turns together: trajectories in the same context share its forward, never
    their random numbers. Starts may be of different turns.
    """
    paths: list[list[list[Step]]] = [[[] for _ in range(start.count)] for start in starts]
    # turn number -> context -> (its state, the trajectories in it)
    waiting: dict[int, dict[Ids, Node]] = defaultdict(dict)

    def put(state: State, owner: int, particle: int) -> None:
        waiting[state.turn].setdefault(state.ids, (state, []))[1].append((owner, particle))

    for owner, start in enumerate(starts):
        for particle in range(start.count):
            put(start.state, owner, particle)
    while waiting:
        # Several ways may lead to a context: the number of a particle must not depend on the other particles.
        nodes = [(state, sorted(at)) for state, at in waiting.pop(min(waiting)).values()]
        asks = [Ask(state.ids, _numbers(starts, protocol.budget(state), state, at)) for state, at in nodes]
        texts = sampler.sample(asks)
        for (_, at), steps in zip(nodes, _follow(protocol, nodes, texts), strict=True):
            for (owner, particle), step in zip(at, steps, strict=True):
                paths[owner][particle].append(step)
                if step.next is not None:
                    put(step.next, owner, particle)
    return [[Trajectory(path) for path in of_start] for of_start in paths]


def _numbers(starts: Sequence[Start], budget: int, state: State, at: Sequence[tuple[int, int]]) -> np.ndarray:
    """Uniform numbers [particles, budget]; particles of one start are neighbours in ``at``."""
    drawn = {
        owner: iter(uniforms(*starts[owner].key, digest(state.ids), particles=n, tokens=budget))
        for owner, n in Counter(owner for owner, _ in at).items()
    }
    return np.stack([next(drawn[owner]) for owner, _ in at])
