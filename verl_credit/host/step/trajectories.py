"""Sample trajectories with their credit, for the report and for reading along."""

from __future__ import annotations

from verl_credit.host.step.estimator import TurnStep
from verl_credit.reward.qa import gold_answers
from verl_credit.turns.batch import TurnBatch


def sample_trajectories(turns: TurnBatch, step: TurnStep, tokenizer, count: int) -> list[dict]:
    """Up to ``count`` valid rows: the longest of every group first, then the rest; the choice repeats."""
    order = sorted(
        (row for row in range(len(turns.records)) if turns.row_valid_B[row]),
        key=lambda row: (-int(turns.n_turns_B[row]), row),
    )
    groups: set[int] = set()
    first, rest = [], []
    for row in order:
        group = int(step.group_B[row])
        (rest if group in groups else first).append(row)
        groups.add(group)
    return [_describe(turns, step, tokenizer, row) for row in (first + rest)[:count]]


def _describe(turns: TurnBatch, step: TurnStep, tokenizer, row: int) -> dict:
    record = turns.records[row]
    n_turns = int(turns.n_turns_B[row])
    texts = _turn_texts(turns.response_ids[row], turns.turn_ids_B_T[row].tolist(), n_turns, tokenizer)
    described = []
    for turn, (written, observed) in enumerate(texts):
        answer = turn == n_turns - 1
        has_gain = not answer and bool(step.rewarded_B_K[row, turn])
        described.append(
            {
                "text": written,
                "observation": observed,
                "info_gain": float(step.info_gain_B_K[row, turn]) if has_gain else None,
                "advantage": float(step.credit.advantage_B_K1[row, turn]),
                "clip_scale": float(step.credit.clip_scale_B_K1[row, turn]),
            }
        )
    return {
        "question": str(turns.extra_infos[row].get("question", "")),
        "golds": gold_answers(turns.ground_truths[row]),
        "gold_ids": turns.extra_infos[row].get("gold_ids"),
        "searches": record["searches"],
        "outcome": float(step.outcome_B[row]),
        "stop_reason": record["stop_reason"],
        "turns": described,
    }


def _turn_texts(ids: list[int], turn_ids: list[int], n_turns: int, tokenizer) -> list[tuple[str, str]]:
    """(what the policy wrote, what it was shown next) per turn; tokens before the first turn are dropped."""
    written: list[list[int]] = [[] for _ in range(n_turns)]
    observed: list[list[int]] = [[] for _ in range(n_turns)]
    current = -1
    for token, turn in zip(ids, turn_ids, strict=False):
        current = turn if turn >= 0 else current
        if current >= 0:
            (written if turn >= 0 else observed)[current].append(token)
    return [(tokenizer.decode(w), tokenizer.decode(o)) for w, o in zip(written, observed, strict=True)]
