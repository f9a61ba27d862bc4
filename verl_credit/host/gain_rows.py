"""Information gain, first scorer: one ordinary row per context through verl's ``compute_log_prob``.

Simple and exact: O(turns x length) tokens. Identical contexts (the bare prompt of a group) are scored
once. Faster scorers are tested against this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import response_from_nested

from verl_credit.host.answer_template import PseudoAnswer


@dataclass(frozen=True)
class ScoreRow:
    """One context and the pseudo-answer behind it."""

    context_ids: tuple[int, ...]
    answer: PseudoAnswer


def context_ends(turn_ids: Sequence[int], where: str) -> list[int]:
    """Exclusive end, in response tokens, of the context after each tool turn (all turns but the last).

    ``observation``: up to the first token of the next turn, so the observation and the assistant header
    are inside. ``call``: up to the end of the turn's own tokens, before its observation (the released
    convention: the last retrieved result is never measured).
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, turn in enumerate(turn_ids):
        if turn >= 0:
            first.setdefault(turn, position)
            last[turn] = position
    n_tool_turns = max(first, default=0)
    if where == "observation":
        return [first[turn + 1] for turn in range(n_tool_turns)]
    return [last[turn] + 1 for turn in range(n_tool_turns)]


def score_rows(
    compute_log_prob: Callable[[TensorDict], TensorDict], rows: Sequence[ScoreRow], *, dp_size: int
) -> torch.Tensor:
    """Mean log-prob of the gold tokens for every row, float64 [N], at temperature 1.

    score = (1/|gold|) sum_j log pi(gold_j | context, template, gold_<j)
    """
    distinct = list(dict.fromkeys(rows))
    padded = distinct + [distinct[0]] * (-len(distinct) % dp_size)
    output = compute_log_prob(_log_prob_batch(padded))
    answers = torch.nested.as_nested_tensor(
        [torch.ones(len(row.answer.token_ids)) for row in padded], layout=torch.jagged
    )
    log_probs = response_from_nested(output["log_probs"], answers)
    value = {
        row: log_probs[i][row.answer.gold_start : row.answer.gold_end].double().mean()
        for i, row in enumerate(distinct)
    }
    return torch.stack([value[row] for row in rows])


def _log_prob_batch(rows: Sequence[ScoreRow]) -> TensorDict:
    def nested(lists):
        return torch.nested.as_nested_tensor([torch.tensor(x) for x in lists], layout=torch.jagged)

    prompts = [list(row.context_ids) for row in rows]
    answers = [list(row.answer.token_ids) for row in rows]
    masks = [[1] * len(answer) for answer in answers]
    batch = TensorDict(
        {
            "prompts": nested(prompts),
            "responses": nested(answers),
            "input_ids": nested([p + a for p, a in zip(prompts, answers, strict=True)]),
            "position_ids": nested(
                [list(range(len(p) + len(a))) for p, a in zip(prompts, answers, strict=True)]
            ),
            "response_mask": nested(masks),
            "loss_mask": nested(masks),
        },
        batch_size=len(rows),
    )
    tu.assign_non_tensor(batch, calculate_entropy=False, compute_loss=False, temperature=1.0)
    return batch
