"""Imperfect walks over a lake, from which the policy learns.

A walk is careful or careless from its first move to its last, and the prompt does not say which. So where the policy sees
the history, what it did tells what it will do, and two histories that end in the same place differ in value.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from lakes import text
from lakes.lakes import DIRECTIONS, Lake
from lakes.world import GridWorld
from verl_credit.worlds.lab.demos import Segment

DISCOUNT, SWEEPS = 0.95, 200


@dataclass(frozen=True)
class WalkStyle:
    careful: float = 0.5
    """the share of careful walks"""
    random_careful: float = 0.1
    random_careless: float = 0.7
    """the probability that a move is any of the four, whatever the lake"""
    stop: float = 0.02
    """the probability that a turn gives up"""


def good_moves(lake: Lake) -> dict[int, list[int]]:
    """The best moves from each cell, all of them, by value iteration with a discount: the shortest ways."""
    value = dict.fromkeys(lake.ice, 0.0)
    for _ in range(SWEEPS):
        q = {
            key: sum(
                at.probability * (at.reward if at.ends else DISCOUNT * value[at.cell]) for at in landings
            )
            for key, landings in lake.landings.items()
        }
        value = {cell: max(q[cell, move] for move in range(len(DIRECTIONS))) for cell in lake.ice}
    return {
        cell: [move for move in range(len(DIRECTIONS)) if q[cell, move] > value[cell] - 1e-9]
        for cell in lake.ice
    }


def write_walks(world: GridWorld, style: WalkStyle, count: int, seed: int) -> list[list[Segment]]:
    """``count`` walks as segments (text, whether the policy wrote it): whole ones where the policy sees its history, else
    each turn behind its own prompt."""
    rng = random.Random(f"walks {seed}")
    good = [good_moves(lake) for lake in world.lakes]
    starts, found = world.starts(), []
    for _ in range(count):
        start = rng.choice(starts)
        lake, cell = world.lakes[start.question], start.cell
        randomly = style.random_careful if rng.random() < style.careful else style.random_careless
        segments: list[Segment] = []
        # Half of them begin later, so that a prompt with few moves left is nothing new to the policy.
        gone = rng.choice((0, rng.randrange(world.horizon)))
        for left in range(world.horizon - gone, 0, -1):
            if world.context == "state" or not segments:
                segments.append((text.prompt(lake.name, cell, left), False))
            else:
                segments.append((text.observation(cell, left), False))
            if rng.random() < style.stop:
                segments.append((text.STOP, True))
                break
            move = rng.choice(
                range(len(DIRECTIONS)) if rng.random() < randomly else good[start.question][cell]
            )
            segments.append((text.call(move), True))
            landings = lake.landings[cell, move]
            (landing,) = rng.choices(landings, [at.probability for at in landings])
            if landing.ends:
                break
            cell = landing.cell
        pairs = [segments[i : i + 2] for i in range(0, len(segments), 2)]
        found += pairs if world.context == "state" else [segments]
    return found
