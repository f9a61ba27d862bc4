"""Trajectories as the rows that a step of training reads, and the rows that a step kept as trajectories."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from verl_credit.errors import PreflightError
from verl_credit.turns.book import RowRecord, TurnBatch
from verl_credit.turns.requests import turn_spans
from verl_credit.worlds.rollouts.protocol import Protocol, State, Step
from verl_credit.worlds.rollouts.rollout import Trajectory
from verl_credit.worlds.rollouts.sampler import Ids


def turn_batch(
    trajectories: Sequence[Trajectory], truths: Sequence, data: Sequence[Mapping] | None = None
) -> TurnBatch:
    """``truths[question]``: the data set's ground truth; ``data[question]``: its whole row, which turn signals of the user's
    may read. Turn ids are -1 on the tool's answers."""
    prompts, responses, turn_ids = [], [], []
    for trajectory in trajectories:
        first, last = trajectory.steps[0].state, trajectory.steps[-1]
        start = first.prompt_length
        response = [*last.state.ids[start:], *last.turn_ids]
        ids = [-1] * len(response)
        for number, step in enumerate(trajectory.steps):
            at = len(step.state.ids) - start
            ids[at : at + len(step.turn_ids)] = [number] * len(step.turn_ids)
        prompts.append(list(first.ids[:start]))
        responses.append(response)
        turn_ids.append(torch.tensor(ids))
    rows = len(responses)
    of_data = [{} if data is None else data[t.steps[0].state.question] for t in trajectories]
    turn_ids_B_T = torch.nn.utils.rnn.pad_sequence(turn_ids, batch_first=True, padding_value=-1)
    n_turns = [len(trajectory.steps) for trajectory in trajectories]
    return TurnBatch(
        prompt_ids=prompts,
        response_ids=responses,
        turn_ids_B_T=turn_ids_B_T,
        response_mask_B_T=(turn_ids_B_T >= 0).long(),
        records=[_record(trajectory) for trajectory in trajectories],
        scores=[{"em": trajectory.reward} for trajectory in trajectories],
        ground_truths=[truths[trajectory.steps[0].state.question] for trajectory in trajectories],
        extra_infos=[row.get("extra_info") or {} for row in of_data],
        columns=[dict(row) for row in of_data],
        is_padding=[False] * rows,
        row_valid_B=torch.ones(rows, dtype=torch.bool),
        n_turns_B=torch.tensor(n_turns),
        turn_rewards=[[None] * (n - 1) for n in n_turns],
    )


def _record(trajectory: Trajectory) -> dict:
    """Anchors by pages and signals of the user's read the searches."""
    searches = [
        {"turn": turn, "query": call.query, "pages": list(pages)}
        for turn, step in enumerate(trajectory.steps)
        for call, pages in zip(step.calls, step.pages, strict=True)
        if call.refused is None
    ]
    return RowRecord(searches=searches, n_searches=len(searches)).as_dict()


def kept_trajectories(
    columns: Mapping[str, list[Any]], rows: Collection[int], prompts: Collection[State], protocol: Protocol
) -> dict[int, Trajectory]:
    """Rebuilds ``rows`` (indices in the batch) from the ``columns`` of a table of rollouts. The outcome is the protocol's,
    exact match.

    A row whose last turn the protocol would have answered ended for a reason of the run's, such as a fault; it is left out.
    Raises PreflightError for a prompt that is not among ``prompts``.
    """
    starts, trajectory_of = {state.ids: state for state in prompts}, {}
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
            trajectory_of[row] = Trajectory(path)
    return trajectory_of


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
