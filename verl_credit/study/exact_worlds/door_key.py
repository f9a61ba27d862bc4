"""MiniGrid's DoorKey: fetch the key, unlock the door, go to the goal. The table is a walk through minigrid's own object."""

from __future__ import annotations

from functools import partial

import torch

from verl_credit.study.exact_worlds.mdp import Mdp, drawn_tasks, tables_of
from verl_credit.worlds.doorkey.moves import LOCKED, OPEN, DoorKey, Layout, State, walk


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


FORWARD = ((1, 0), (0, 1), (-1, 0), (0, -1))
"""The step (x, y) in each of minigrid's directions."""


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
