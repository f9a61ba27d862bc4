"""Trajectories of the sampler as the rows that a step of training reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from verl_credit.turns.batch import TurnBatch
from verl_credit.turns.book import RowRecord
from verl_credit.worlds.rollouts.rollout import Trajectory


def turn_batch(
    trajectories: Sequence[Trajectory], truths: Sequence, data: Sequence[Mapping] | None = None
) -> TurnBatch:
    """``truths[question]``: the data set's ground truth; ``data[question]``: its whole row, which turn signals of the user's
    may read. Turn ids are -1 on what the tool said."""
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
    """The searches are what anchors by pages and a signal of the user's read."""
    searches = [
        {"turn": turn, "query": call.query, "pages": list(pages)}
        for turn, step in enumerate(trajectory.steps)
        for call, pages in zip(step.calls, step.pages, strict=True)
        if call.refused is None
    ]
    return RowRecord(searches=searches, n_searches=len(searches)).as_dict()
