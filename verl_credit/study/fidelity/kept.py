"""Rollouts that a step of training kept, as trajectories: their contexts can be valued like those of sampled ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from verl_credit.errors import PreflightError
from verl_credit.turns.requests import turn_spans
from verl_credit.worlds.rollouts.protocol import Protocol, State, Step
from verl_credit.worlds.rollouts.rollout import Trajectory
from verl_credit.worlds.rollouts.sampler import Ids


def kept_trajectories(
    columns: Mapping[str, list[Any]], rows: Collection[int], prompts: Collection[State], protocol: Protocol
) -> dict[int, Trajectory]:
    """``columns``: of a table of rollouts; ``rows``: those that are wanted, by their places in the batch. Its outcome is the
    protocol's, exact match.

    A row whose last turn the protocol would have answered ended for a reason of the run's, such as a fault, and is left out.
    Raises PreflightError for a prompt that is not among ``prompts``.
    """
    starts, found = {state.ids: state for state in prompts}, {}
    for row, prompt, response, turns in zip(
        *(columns[name] for name in ("row", "prompt_ids", "response_ids", "turn")), strict=True
    ):
        if row not in rows:
            continue
        start = starts.get(tuple(prompt))
        if start is None:
            raise PreflightError(
                f"the prompt of row {row} is not among the {len(starts)} of the lab's split train"
            )
        path = _path(start, tuple(response), turn_spans(turns), protocol)
        if path is not None:
            found[row] = Trajectory(path)
    return found


def _path(start: State, response: Ids, spans: list[tuple[int, int]], protocol: Protocol) -> list[Step] | None:
    states = [
        State(start.question, start.prompt_length, (*start.ids, *response[:first]), turn)
        for turn, (first, _) in enumerate(spans)
    ]
    texts = [response[first:end] for first, end in spans]
    if not texts:
        return None
    (last,) = protocol.steps([(states[-1], texts[-1])])
    if last.next is not None:
        return None
    before = zip(states, texts, states[1:], strict=False)
    return [*(Step(state, text, after, None) for state, text, after in before), last]
