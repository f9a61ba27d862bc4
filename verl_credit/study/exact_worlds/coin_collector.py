"""TextWorld's coin collector without dead ends: rooms in a row, doors in four directions, and a coin in the last room."""

from __future__ import annotations

import random

import torch
from torch.nn.functional import one_hot

from verl_credit.study.exact_worlds.mdp import Mdp, drawn_tasks, tables_of
from verl_credit.worlds.doorkey.moves import Move, walk

STEPS = ((0, 1), (1, 0), (0, -1), (-1, 0))
"""North, east, south, west."""
TAKE = len(STEPS)
"""The action after the four directions; as the last move of a state: there was none."""
State = tuple[int, int]
"""The room's number, and the direction of the last move, which the policy reads to know where it comes from."""


def coin_collector(level: int, limit: int, unseen: int, count: int, seed: int) -> Mdp:
    """Tasks of ``level`` rooms whose plan does not cross itself. A room shows its doors and the coin, and no name."""
    tasks = drawn_tasks(lambda number: plan(level, seed + number), unseen, count)
    maps = [walk([(0, TAKE)], lambda state, of=way: moves(of, state)) for way in tasks]
    return tables_of(
        maps,
        lambda m, state: features(tasks[m], state),
        lambda m, state: state[0] / level,
        [(m, (0, TAKE)) for m in range(len(tasks))],
        limit=limit,
        unseen=unseen,
    )


def plan(level: int, seed: int) -> tuple[int, ...]:
    """The directions from room to room, drawn until no place comes twice."""
    drawn = random.Random(seed)
    while True:
        way, place = [], (0, 0)
        places = {place}
        while len(places) < level:
            free = [d for d, (x, y) in enumerate(STEPS) if (place[0] + x, place[1] + y) not in places]
            if not free:
                break
            way.append(drawn.choice(free))
            place = place[0] + STEPS[way[-1]][0], place[1] + STEPS[way[-1]][1]
            places.add(place)
        else:
            return tuple(way)


def doors(way: tuple[int, ...], room: int) -> dict[int, int]:
    """The room behind each door, by its direction."""
    on = {way[room]: room + 1} if room < len(way) else {}
    back = {(way[room - 1] + 2) % 4: room - 1} if room else {}
    return on | back


def moves(way: tuple[int, ...], state: State) -> list[Move]:
    """A direction without a door, and a coin that is not there, leave everything as it is."""
    room, _ = state
    behind = doors(way, room)
    gone = [((behind[d], d), False) if d in behind else (state, False) for d in range(TAKE)]
    return [*gone, (state, room == len(way))]


def features(way: tuple[int, ...], state: State) -> torch.Tensor:
    """The doors, the last move, each of both together, the coin, and whether there is a single door."""
    room, last = state
    door_4 = torch.tensor([d in doors(way, room) for d in range(TAKE)]).float()
    last_5 = one_hot(torch.tensor(last), TAKE + 1).float()
    more = torch.tensor([room == len(way), door_4.sum() == 1])
    return torch.cat([door_4, last_5, torch.outer(door_4, last_5).flatten(), more])
