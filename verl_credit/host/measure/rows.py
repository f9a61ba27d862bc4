"""Rollouts as agent loops left them, and as the trajectories that a measurement reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from verl_credit.turns.requests import turn_spans
from verl_credit.worlds.rollouts.protocol import SEARCH, Call, State, Step
from verl_credit.worlds.rollouts.rollout import Trajectory
from verl_credit.worlds.rollouts.sampler import Ids


@dataclass(frozen=True)
class Row:
    """``turn_ids``: of every response token, -1 where the policy did not write it."""

    question: int
    prompt_ids: list[int]
    response_ids: list[int]
    turn_ids: list[int]
    record: dict
    scores: dict
    turn_rewards: list
    outcome: float

    @property
    def fault(self) -> str:
        """Why the rollout is not valid; empty where it is."""
        return self.record["tool_fault"] or (
            "" if max(self.turn_ids, default=-1) >= 0 else "no token of the policy's"
        )

    @property
    def texts(self) -> list[Ids]:
        """The token ids of its turns."""
        return [tuple(self.response_ids[first:end]) for first, end in turn_spans(self.turn_ids)]

    def states(self) -> list[State]:
        """The states before each turn."""
        start, ids = len(self.prompt_ids), (*self.prompt_ids, *self.response_ids)
        spans = turn_spans(self.turn_ids)
        return [
            State(self.question, start, ids[: start + first], turn) for turn, (first, _) in enumerate(spans)
        ]


@dataclass(frozen=True)
class RanTrajectory(Trajectory):
    row: Row | None = field(default=None, compare=False)


def trajectory_of(row: Row, *, otherwise: bool = False) -> RanTrajectory:
    states, searched = row.states(), _searched(row)
    steps = [
        Step(state, text, after, None if after else row.outcome, *searched.get(number, ()))
        for number, (state, text, after) in enumerate(
            zip_longest(states, row.texts, states[1:], fillvalue=None)
        )
    ]
    return RanTrajectory(steps, otherwise, row)


def _searched(row: Row) -> dict[int, tuple[tuple[Call, ...], tuple[tuple[str, ...], ...]]]:
    """For each turn that searched, its searches and the ids of the pages that they found."""
    found: dict[int, tuple] = {}
    for search in row.record["searches"]:
        calls, pages = found.get(search["turn"], ((), ()))
        call = Call(SEARCH, "", search["query"], None)
        found[search["turn"]] = (*calls, call), (*pages, tuple(map(str, search["pages"])))
    return found


def replayed(row: Row, turns: Sequence[Ids]) -> bool:
    """Did the agent loop begin with ``turns``? A row that was full before their end has them as far as it goes."""
    texts, turns = row.texts, list(turns)
    if row.record["replayed"] != len(turns):
        return False
    if len(texts) > len(turns):
        return texts[: len(turns)] == turns
    *before, last = texts
    return before == turns[: len(before)] and turns[len(before)][: len(last)] == last


def reaches(row: Row, state: State) -> bool:
    """Does the row begin with ``state``? It does not where a tool answered otherwise than before."""
    return (*row.prompt_ids, *row.response_ids)[: len(state.ids)] == state.ids
