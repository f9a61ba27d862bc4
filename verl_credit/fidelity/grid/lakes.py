"""Frozen lakes: gymnasium's FrozenLake-v1 with its known table of transitions, slippery or not.

A lake is sixteen cells: S and F are ice, H is a hole, G the goal. A move goes where it should; on a slippery lake it goes
there, to the left of it or to the right of it with one chance in three each. At the edge one stays. The episode ends in a
hole with 0 and at the goal with 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import gymnasium
from gymnasium.envs.toy_text.frozen_lake import MAPS

DIRECTIONS = ("left", "down", "right", "up")
"""By gymnasium's number of the action."""
ROWS = (
    tuple(MAPS["4x4"]),
    ("SFFF", "FFHF", "FFFF", "HFFG"),
    ("SFHF", "FFFF", "FFFF", "FFFG"),
    ("SFFH", "FFFF", "HFFF", "FFFG"),
    ("SFFF", "HFFF", "FFFH", "FFFG"),
)
"""The library's map and four more, so that not every prompt is about the same lake."""


@dataclass(frozen=True)
class Landing:
    """One of the cells where a move can end, with its probability."""

    probability: float
    cell: int
    reward: float
    ends: bool


@dataclass(frozen=True)
class Lake:
    name: str
    rows: tuple[str, ...]
    slippery: bool

    @cached_property
    def ice(self) -> list[int]:
        """The cells from which one moves."""
        return [cell for cell, letter in enumerate("".join(self.rows)) if letter in "SF"]

    @cached_property
    def landings(self) -> dict[tuple[int, int], list[Landing]]:
        """(cell, move) -> where it can end; each cell once."""
        environment = gymnasium.make("FrozenLake-v1", desc=list(self.rows), is_slippery=self.slippery)
        found = {}
        for cell in self.ice:
            for move, rows in environment.unwrapped.P[cell].items():
                by_cell: dict[int, Landing] = {}
                for probability, after, reward, ends in rows:
                    before = by_cell[after].probability if after in by_cell else 0.0
                    by_cell[int(after)] = Landing(before + probability, int(after), float(reward), bool(ends))
                found[cell, int(move)] = list(by_cell.values())
        environment.close()
        return found


def make_lakes(slippery: bool, rows: Sequence[Sequence[str]] = ROWS) -> list[Lake]:
    return [Lake(f"lake {number}", tuple(map(str, some)), slippery) for number, some in enumerate(rows, 1)]
