"""Frozen lakes: gymnasium's FrozenLake-v1, slippery or not, with its table of transitions written out.

A lake is sixteen cells: S and F are ice, H is a hole, G the goal. A move goes where it should; on a slippery lake it goes
there, to the left of it or to the right of it with one chance in three each. At the edge one stays. The episode ends in a
hole with 0 and at the goal with 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

DIRECTIONS = ("left", "down", "right", "up")
"""By gymnasium's number of the action."""
STEPS = ((0, -1), (1, 0), (0, 1), (-1, 0))
"""(rows down, columns to the right) of each."""
STRAIGHT = 1 / 3
"""The chance on slippery ice that a move goes where it should."""
ROWS = (
    ("SFFF", "FHFH", "FFFH", "HFFG"),
    ("SFFF", "FFHF", "FFFF", "HFFG"),
    ("SFHF", "FFFF", "FFFF", "FFFG"),
    ("SFFH", "FFFF", "HFFF", "FFFG"),
    ("SFFF", "HFFF", "FFFH", "FFFG"),
)
"""The map of gymnasium and four more, so that not every prompt is about the same lake."""


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
        side, letters, found = len(self.rows), "".join(self.rows), {}
        for cell, move in product(self.ice, range(len(DIRECTIONS))):
            by_cell: dict[int, Landing] = {}
            for direction, probability in self._directions(move):
                row, column = divmod(cell, side)
                down, right = STEPS[direction]
                row, column = min(max(row + down, 0), side - 1), min(max(column + right, 0), side - 1)
                after = row * side + column
                before = by_cell[after].probability if after in by_cell else 0.0
                letter = letters[after]
                by_cell[after] = Landing(before + probability, after, float(letter == "G"), letter in "GH")
            found[cell, move] = list(by_cell.values())
        return found

    def _directions(self, move: int) -> list[tuple[int, float]]:
        """Where the ice may take a move, with the chance of each."""
        if not self.slippery:
            return [(move, 1.0)]
        aside = (1 - STRAIGHT) / 2
        return [((move - 1) % 4, aside), (move, STRAIGHT), ((move + 1) % 4, aside)]


def make_lakes(slippery: bool, rows: Sequence[Sequence[str]] = ROWS) -> list[Lake]:
    return [Lake(f"lake {number}", tuple(map(str, some)), slippery) for number, some in enumerate(rows, 1)]
