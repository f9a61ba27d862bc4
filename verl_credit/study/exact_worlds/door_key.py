"""MiniGrid's DoorKey: fetch the key, unlock the door, go to the goal. The table is a walk through minigrid's own object."""

from __future__ import annotations

from functools import cache, partial
from typing import NamedTuple

import torch

from verl_credit.study.exact_worlds.mdp import Mdp, Move, drawn_tasks, tables_of, walk

ACTIONS = (0, 1, 2, 3, 5)
"""minigrid's numbers of left, right, forward, pickup, toggle. The key is never dropped."""
OPEN, CLOSED, LOCKED = range(3)
"""The states of the door as minigrid encodes them."""
FORWARD = ((1, 0), (0, 1), (-1, 0), (0, -1))
"""The step (x, y) in each of minigrid's directions."""


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


def door_key(size: int, limit: int, unseen: int, count: int, seed: int) -> Mdp:
    """Tasks of DoorKey-``size`` x ``size``. The resets of minigrid with the seeds from ``seed`` on draw them; there are few
    layouts, and each is a map."""
    envs: dict[Layout, DoorKey] = {}

    def draw(number: int) -> tuple[Layout, State]:
        env = DoorKey(size, seed + number)
        envs.setdefault(env.layout, env)
        return env.layout, env.state

    tasks = drawn_tasks(draw, unseen, count)
    layouts = sorted({layout for layout, _ in tasks})
    starts = {layout: {start for at, start in tasks if at == layout} for layout in layouts}
    maps = [walk(sorted(starts[layout]), envs[layout].moves) for layout in layouts]
    return tables_of(
        maps,
        lambda m, state: features(layouts[m], state, size),
        lambda m, state: (state.carries + (state.door != LOCKED)) / 2,
        [(layouts.index(layout), start) for layout, start in tasks],
        limit=limit,
        unseen=unseen,
    )


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
        return [self.step(state, action) for action in ACTIONS]

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


def features(layout: Layout, state: State, size: int) -> torch.Tensor:
    """What a text would say: where key, door and goal are from here, walls around, and what is done; and each again by the
    phase (no key, a shut door, an open door)."""
    ahead = FORWARD[state.direction]
    right = -ahead[1], ahead[0]
    numbers: list[float] = []
    for place in layout:
        apart = place[0] - state.x, place[1] - state.y
        forward, sideways = (apart[0] * axis[0] + apart[1] * axis[1] for axis in (ahead, right))
        signs = forward > 0, forward < 0, sideways > 0, sideways < 0, (forward, sideways) == (1, 0)
        numbers += [*map(float, signs), forward / size, sideways / size]
    free = partial(_free, layout, size)
    around = (ahead, right, (-right[0], -right[1]))
    numbers += [float(not free(state.x + step[0], state.y + step[1])) for step in around]
    open_door = state.door == OPEN
    own = torch.tensor([*numbers, state.carries, open_door])
    phase = not state.carries, state.carries and not open_door, open_door
    return torch.cat([own, *(own * here for here in phase)])


def _free(layout: Layout, size: int, x: int, y: int) -> bool:
    """No wall stands there: the outer ones, and the one of the door."""
    inside = 0 < x < size - 1 and 0 < y < size - 1
    return inside and (x != layout.door[0] or (x, y) == layout.door)
