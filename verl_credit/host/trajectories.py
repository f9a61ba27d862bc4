"""Sample trajectories with their credit, for the report and for reading along."""

from __future__ import annotations

from verl_credit.host.credit_step import TurnStep
from verl_credit.host.turn_batch import TurnBatch


def sample_trajectories(turns: TurnBatch, step: TurnStep, tokenizer, count: int) -> list[dict]:
    """Up to ``count`` valid rows, the longest of different groups first; ties by row, so a choice repeats."""
    order = sorted(
        (row for row in range(len(turns.records)) if turns.row_valid_B[row]),
        key=lambda row: (-int(turns.n_turns_B[row]), row),
    )
    chosen, groups = [], set()
    for row in order:
        group = int(step.group_B[row])
        if group not in groups and len(chosen) < count:
            groups.add(group)
            chosen.append(row)
    return [_describe(turns, step, tokenizer, row) for row in chosen]


def _describe(turns: TurnBatch, step: TurnStep, tokenizer, row: int) -> dict:
    record = turns.records[row]
    n_turns = int(turns.n_turns_B[row])
    texts = _turn_texts(turns.response_ids[row], turns.turn_ids_B_T[row].tolist(), n_turns, tokenizer)
    described = []
    for turn, (written, observed) in enumerate(texts):
        answer = turn == n_turns - 1
        has_gain = not answer and bool(step.turn_mask_B_K[row, turn])
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
        "question": turns.questions[row],
        "golds": list(_golds(turns.ground_truths[row])),
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


def _golds(ground_truth):
    from verl_credit.host.reward import gold_answers

    return gold_answers(ground_truth)
