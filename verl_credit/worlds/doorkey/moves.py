"""What the actions do in a DoorKey of minigrid, in any state: the answers of minigrid's own object."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cache
from typing import NamedTuple

Move = tuple[Hashable, bool]
"""The state that an action leads to, and whether the task is solved by it."""
Moves = dict[Hashable, list[Move]]
"""The moves of each state, one for each action."""

ACTIONS = {"left": 0, "right": 1, "forward": 2, "pickup": 3, "toggle": 5}
"""minigrid's numbers. The key is never dropped."""
OPEN, CLOSED, LOCKED = range(3)
"""The states of the door as minigrid encodes them."""


class Layout(NamedTuple):
    key: tuple[int, int]
    door: tuple[int, int]
    goal: tuple[int, int]


class State(NamedTuple):
    x: int
    y: int
    direction: int
    carries: bool
    door: int


class DoorKey:
    """minigrid's environment after a reset, whose objects can be set to any state."""

    def __init__(self, size: int, seed: int):
        self._env = _environment(size)
        self._env.reset(seed=seed)
        self.grid = self._env.grid
        places = {
            thing.type: (x, y)
            for x in range(size)
            for y in range(size)
            if (thing := self.grid.get(x, y)) is not None and thing.type != "wall"
        }
        self.layout = Layout(*(places[name] for name in Layout._fields))
        self._key, self._door = self.grid.get(*self.layout.key), self.grid.get(*self.layout.door)
        self.state = self._read()

    def moves(self, state: State) -> list[Move]:
        return [self.step(state, action) for action in ACTIONS.values()]

    def step(self, state: State, action: int) -> Move:
        """minigrid's answer to its action in the state."""
        env = self._env
        env.grid, env.step_count = self.grid, 0
        env.agent_pos, env.agent_dir = (state.x, state.y), state.direction
        env.carrying = self._key if state.carries else None
        self.grid.set(*self.layout.key, None if state.carries else self._key)
        self._door.is_open, self._door.is_locked = state.door == OPEN, state.door == LOCKED
        reward, ended = env.step(action)[1:3]
        return self._read(), bool(ended and reward > 0)

    def _read(self) -> State:
        env = self._env
        x, y = map(int, env.agent_pos)
        return State(x, y, int(env.agent_dir), env.carrying is not None, self._door.encode()[2])


@cache
def _environment(size: int):
    """One environment for all layouts, without pictures, which nothing here looks at."""
    from minigrid.envs import DoorKeyEnv

    env = DoorKeyEnv(size=size)
    env.gen_obs = lambda: None
    return env


def walk(starts: Iterable[Hashable], moves: Callable[[Hashable], Sequence[Move]]) -> Moves:
    """The moves of every state that is reached from ``starts``, breadth-first. A move that solves the task leads nowhere."""
    found: Moves = {}
    waiting = [*starts]
    for state in waiting:  # the loop appends to this list
        if state not in found:
            found[state] = list(moves(state))
            waiting += [after for after, solved in found[state] if not solved]
    return found


def shortest(moves: Moves) -> dict[Hashable, list[int]]:
    """The actions that begin a shortest way from each state; none where no way solves the task."""
    best: dict[Hashable, list[int]] = {state: [] for state in moves}
    reached: set[Hashable] = set()
    while True:
        nearer = {
            state: [a for a, (after, solved) in enumerate(moves[state]) if solved or after in reached]
            for state in moves
            if state not in reached
        }
        found = {state: actions for state, actions in nearer.items() if actions}
        if not found:
            return best
        best |= found
        reached |= found.keys()
