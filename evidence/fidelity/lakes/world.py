"""Lakes as a text tool: what `roll` and `fidelity.values.values_of` ask of a protocol.

Each turn the policy writes a call of the tool ``move``; the tool answers where one stands and how many moves are left. Any
other text ends the episode with 0, and so does the last move that does not reach the goal.

    state      the policy sees a prompt with the lake, the cell and the moves left: V is a function of these
    history    it sees the first prompt and all turns and answers since: V is a function of all that
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from lakes import text
from lakes.lakes import DIRECTIONS, Lake
from verl_credit.worlds.rollouts import rollout
from verl_credit.worlds.rollouts.protocol import State, Step
from verl_credit.worlds.rollouts.rollout import Start, Trajectory
from verl_credit.worlds.rollouts.sampler import Ids, TurnSampler

Context = Literal["state", "history"]


@dataclass(frozen=True)
class Place(State):
    """``question``: the number of the lake; ``turn``: moves made."""

    cell: int = 0


def roll(sampler: TurnSampler, world: GridWorld, starts: Sequence[Start]) -> list[list[Trajectory]]:
    """As `rollout.roll`; the ice decides about each trajectory by a random number of its own."""
    return rollout.roll(sampler, world, starts, _by_luck)


def _by_luck(starts, world, nodes, texts) -> list[list[Step]]:
    luck = [rollout.numbers(starts, 1, state, at, "tool")[:, 0].tolist() for state, at in nodes]
    return [
        [world.drawn(state, text, number) for text, number in zip(of_node, numbers, strict=True)]
        for (state, _), of_node, numbers in zip(nodes, texts, luck, strict=True)
    ]


class GridWorld:
    """A call counts if the turn has the very tokens that the tokenizer makes of it: each move is one text."""

    def __init__(self, tokenizer, lakes: Sequence[Lake], *, context: Context, horizon: int = text.HORIZON):
        self._tokenizer, self.lakes, self.context, self.horizon = tokenizer, list(lakes), context, horizon
        self.calls: list[Ids] = [self._encode(text.call(move)) for move in range(len(DIRECTIONS))]
        self._move_of = {ids: move for move, ids in enumerate(self.calls)}
        self._budget = max(map(len, [*self.calls, self._encode(text.STOP)]))
        self._known: dict[tuple[Ids, Ids], list[tuple[float, Step]]] = {}

    def budget(self, state: State) -> int:
        """Tokens that the next turn may have."""
        return self._budget

    def start(self, lake: int, cell: int, turn: int = 0) -> Place:
        """An episode of which ``turn`` moves are gone, and nobody remembers them."""
        ids = self._encode(text.prompt(self.lakes[lake].name, cell, self.horizon - turn))
        return Place(lake, len(ids), ids, turn, cell)

    def starts(self) -> list[Place]:
        """From every cell of ice."""
        return [self.start(number, cell) for number, lake in enumerate(self.lakes) for cell in lake.ice]

    def move_of(self, turn_ids: Ids) -> int | None:
        """None: the text is no call."""
        return self._move_of.get(turn_ids)

    def chances(self, state: Place, turn_ids: Ids) -> list[tuple[float, Step]]:
        """All that can follow the turn, with its probabilities."""
        key = state.ids, turn_ids
        if key not in self._known:
            self._known[key] = self._chances(state, turn_ids)
        return self._known[key]

    def drawn(self, state: Place, turn_ids: Ids, luck: float) -> Step:
        """The one among them that the number ``luck`` in [0, 1) falls on."""
        chances = self.chances(state, turn_ids)
        ends = list(accumulate(probability for probability, _ in chances[:-1]))
        return chances[bisect_right(ends, luck)][1]

    def _chances(self, state: Place, turn_ids: Ids) -> list[tuple[float, Step]]:
        move = self.move_of(turn_ids)
        if move is None:
            return [(1.0, Step(state, turn_ids, None, 0.0))]
        found = []
        for landing in self.lakes[state.question].landings[state.cell, move]:
            if landing.ends or state.turn + 1 == self.horizon:
                step = Step(state, turn_ids, None, landing.reward)
            else:
                step = Step(state, turn_ids, self._after(state, turn_ids, landing.cell), None)
            found.append((landing.probability, step))
        return found

    def _after(self, state: Place, turn_ids: Ids, cell: int) -> Place:
        turn = state.turn + 1
        if self.context == "state":
            return self.start(state.question, cell, turn)
        told = self._encode(text.observation(cell, self.horizon - turn))
        return Place(state.question, state.prompt_length, (*state.ids, *turn_ids, *told), turn, cell)

    def _encode(self, written: str) -> Ids:
        return tuple(self._tokenizer.encode(written, add_special_tokens=False))
