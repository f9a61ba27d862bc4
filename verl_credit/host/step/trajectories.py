"""Sample trajectories with their credit, for the report and for reading along."""

from __future__ import annotations

import torch

from verl_credit.config.settings import INFO_GAIN
from verl_credit.credit.groups import z_score_per_turn
from verl_credit.turns.assign import StepCredit
from verl_credit.turns.reward.qa import gold_answers
from verl_credit.turns.signals import turn_texts


def sample_trajectories(step: StepCredit, count: int) -> list[dict]:
    """Up to ``count`` valid rows: the longest of every group first, then the rest; the choice repeats.

    Each has its whole ``group`` in numbers, itself at ``place``: credit means nothing without the siblings.
    """
    turns, group_B = step.inputs.turns, step.tables.group_B
    order = sorted(
        (row for row in range(len(turns.records)) if turns.row_valid_B[row]),
        key=lambda row: (-int(turns.n_turns_B[row]), row),
    )
    groups: dict[int, list[int]] = {}
    first, rest = [], []
    for row in order:
        members = groups.setdefault(int(group_B[row]), [])
        (rest if members else first).append(row)
        members.append(row)
    z_B_K = _normalised_gains(step)
    described = []
    for row in (first + rest)[:count]:
        members = sorted(groups[int(group_B[row])])
        group = [
            {"outcome": float(step.tables.outcome_B[one]), "turns": _credit(step, z_B_K, one)}
            for one in members
        ]
        whole = _describe(step, row, _credit(step, z_B_K, row))
        described.append(whole | {"group": group, "place": members.index(row)})
    return described


def _normalised_gains(step: StepCredit) -> torch.Tensor | None:
    """z of every gain among the same turn of its prompt's other rows, where the turn mode compares gains so."""
    algorithm = step.settings.algorithm
    mode = algorithm.turn_mode
    if not step.inputs.rewarding or not mode.scales_clip or algorithm.replaces_turns:
        return None
    options = {**mode.options, **step.settings.turn_options}
    norm = {
        name: options[name] for name in ("norm_by_std", "ddof", "variance_floor", "eps") if name in options
    }
    return z_score_per_turn(step.tables.reward_B_K, step.rewarded_B_K, step.tables.group_B, **norm)


def _credit(step: StepCredit, z_B_K: torch.Tensor | None, row: int) -> list[dict]:
    """The numbers of every turn of a row; the last turn is the answer, which has no turn reward."""
    answer = int(step.inputs.turns.n_turns_B[row]) - 1
    reward = "info_gain" if list(step.settings.turn_signals) == [INFO_GAIN] else "turn_reward"
    has_gain = [turn < answer and bool(step.rewarded_B_K[row, turn]) for turn in range(answer + 1)]
    return [
        {
            reward: float(step.tables.reward_B_K[row, turn]) if has_gain[turn] else None,
            "z": float(z_B_K[row, turn]) if has_gain[turn] and z_B_K is not None else None,
            "advantage": float(step.credit.advantage_B_K1[row, turn]),
            "clip_scale": float(step.credit.clip_scale_B_K1[row, turn]),
        }
        for turn in range(answer + 1)
    ]


def _describe(step: StepCredit, row: int, credit: list[dict]) -> dict:
    turns = step.inputs.turns
    record = turns.records[row]
    ids, turn_ids = turns.response_ids[row], turns.turn_ids_B_T[row].tolist()
    texts = turn_texts(ids, turn_ids, len(credit), step.inputs.run.tokenizer.decode)
    return {
        "question": str(turns.extra_infos[row].get("question", "")),
        "golds": gold_answers(turns.ground_truths[row]),
        "gold_ids": turns.extra_infos[row].get("gold_ids"),
        "searches": record["searches"],
        "outcome": float(step.tables.outcome_B[row]),
        "stop_reason": record["stop_reason"],
        "turns": [
            {"text": written, "observation": observed} | numbers
            for (written, observed), numbers in zip(texts, credit, strict=True)
        ],
    }
