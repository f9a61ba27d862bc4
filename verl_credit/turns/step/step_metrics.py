"""Metrics of the credit step, all under ``credit/``.

verl reduces metrics by substring of their name (max, min, sum, total), therefore the names here avoid those words unless
they mean it. Means are per row or per turn; nothing is averaged twice.
"""

from __future__ import annotations

from collections import Counter

from verl_credit.config.settings import INFO_GAIN
from verl_credit.credit.groups import group_counts
from verl_credit.lazy import torch
from verl_credit.names import INVALID_ACTIONS, ROWS_LEFT_OUT, TURNS_CUT
from verl_credit.turns.rollout.book import IN_ENVIRONMENT, NO_TOKEN, STOP_REASONS, TurnBatch
from verl_credit.turns.rollout.reward.env_record import FAULTS
from verl_credit.turns.rollout.search.faults import FAULT_CODES
from verl_credit.turns.step.assign import StepCredit

COUNTED = (  # where the mode counts them
    "nonfinite_outcomes", "nonfinite_rewards", "turns_without_reward", "turn_groups", "turn_groups_of_one",
    "turn_groups_of_two", "turns_without_anchor", "states", "states_of_one", "turns_without_score",
    "groups_with_and_without_scores",
)  # fmt: skip
TOOL_COUNTS = {
    "retries": "n_retries", "bad_calls": "bad_calls", "other_calls": "n_other_calls", "other_errors": "other_errors",
}  # fmt: skip
SCORES = ("em", "f1", "format_ok", "format_penalty")


def row_metrics(turns: TurnBatch) -> dict[str, float]:
    """Metrics of what agent loops reported, over all real rows, and of the reward function's scores, over the valid rows."""
    real = [row for row, pad in enumerate(turns.is_padding) if not pad]
    records, rows = [turns.records[row] for row in real], max(len(real), 1)
    reasons = Counter(record["stop_reason"] for record in records)
    in_environment = any(record["environment"] for record in records)
    stops = [reason for reason in STOP_REASONS if in_environment or reason not in IN_ENVIRONMENT]
    metrics: dict[str, float] = {f"credit/stop/{reason}": reasons[reason] / rows for reason in stops}
    all_turns = int(turns.n_turns_B[real].sum())
    metrics[TURNS_CUT] = reasons["turn_length"] / max(all_turns, 1)  # a turn that is cut is its row's last
    faults = Counter(record["tool_fault"] for record in records if record["tool_fault"])
    metrics |= {
        f"credit/tool/fault_{code}": faults[code]
        for code in (*FAULT_CODES, *(FAULTS if in_environment else ()), NO_TOKEN)
    }
    metrics["credit/tool/fault_rows"] = sum(faults.values())
    for name, field in TOOL_COUNTS.items():
        metrics[f"credit/tool/{name}"] = sum(record[field] for record in records)
    metrics["credit/tool/searches_per_row"] = sum(record["n_searches"] for record in records) / rows
    empty = sum(not search["pages"] for record in records for search in record["searches"])
    metrics["credit/tool/empty_searches"] = empty  # a server that lost its index finds nothing, too
    whole = [record for record in records if record["environment"] and not record["tool_fault"]]
    ends = [record["environment"] for record in whole]
    for name in ("success", "return", "steps", "cut") if ends else ():
        metrics[f"credit/env/{name}"] = sum(one[name] for one in ends) / len(ends)
    if steps := sum(one["steps"] for one in ends):
        metrics[INVALID_ACTIONS] = sum(record["bad_calls"] for record in whole) / steps
    metrics["credit/rows_trained"] = int(turns.row_valid_B.sum())
    for name in SCORES:
        values = [
            turns.scores[row][name] for row in real if turns.row_valid_B[row] and name in turns.scores[row]
        ]
        if values:
            metrics[f"credit/outcome/{name}"] = sum(values) / len(values)
    return metrics


def gain_metrics(step: StepCredit) -> dict[str, float]:
    """Mean, spread and share of positive ones of the turns' rewards, and their mean per turn index.

    Their names begin with ``credit/gain`` where information gain is the only signal, else with ``credit/turn_reward``.
    """
    mask, gain = step.rewarded_B_K, step.tables.reward_B_K
    name = "credit/gain" if list(step.settings.turn_signals) == [INFO_GAIN] else "credit/turn_reward"
    metrics: dict[str, float] = {f"{name}/turns": int(mask.sum())}
    if not mask.any():
        return metrics
    values = gain[mask].double()
    metrics |= {f"{name}/mean": _mean(values), f"{name}/std": values.std(correction=0).item()}
    metrics[f"{name}/share_positive"] = _mean(values > 0)
    for turn in range(mask.shape[1]):
        if mask[:, turn].any():
            metrics[f"{name}/turn_{turn}"] = _mean(gain[mask[:, turn], turn])
    return metrics


def credit_metrics(step: StepCredit, group_size: int) -> dict[str, float]:
    """Metrics of turns, advantages per turn index, clip scale, and groups.

    Groups are counts: all, singletons, short (fewer valid rows than rollout.n), tied, and the tied ones split
    into all solved (outcome above 0.5) and all failed. verl puts padding rows into a group of their own, which is left out.
    """
    credit, tables, turns = step.credit, step.tables, step.inputs.turns
    valid, n_turns_B = tables.valid_B, turns.n_turns_B
    real = ~torch.tensor(turns.is_padding)
    metrics: dict[str, float] = {"credit/invalid_rows": int((real & ~valid).sum())}
    metrics |= {f"credit/{name}": credit.counts[name] for name in COUNTED if name in credit.counts}
    if "rows_left_out" in credit.counts:
        metrics[ROWS_LEFT_OUT] = credit.counts["rows_left_out"] / max(int(valid.sum()), 1)
    metrics |= {
        f"credit/groups/{name.removesuffix('_groups')}": count
        for name, count in group_counts(
            tables.outcome_B[real], tables.group_B[real], row_valid_B=valid[real], group_size=group_size
        ).items()
    }
    metrics["credit/turns_per_row"] = _mean(n_turns_B[valid]) if valid.any() else 0.0
    for turn in range(credit.advantage_B_K.shape[1]):
        rows = valid & (n_turns_B - 1 > turn)
        if rows.any():
            metrics[f"credit/advantage/turn_{turn}"] = _mean(credit.advantage_B_K[rows, turn])
            metrics[f"credit/advantage_abs/turn_{turn}"] = _mean(credit.advantage_B_K[rows, turn].abs())
    if valid.any():
        metrics["credit/advantage/answer"] = _mean(credit.outcome_advantage_B[valid])
        metrics["credit/advantage_abs/answer"] = _mean(credit.outcome_advantage_B[valid].abs())
    mask = step.rewarded_B_K
    if mask.any():
        scale = credit.clip_scale_B_K[mask].double()
        metrics["credit/clip_scale/mean"] = _mean(scale)
        metrics["credit/clip_scale/std"] = scale.std(correction=0).item()
    return metrics


def score_metrics(step: StepCredit) -> dict[str, float]:
    """verl's metrics of the score where rollouts have several outputs: each rollout counts once, and not each output."""
    turns = step.inputs.turns
    if turns.sessions is None:
        return {}
    score_b = step.tables.outcome_B[~torch.tensor(turns.is_padding)]
    return {
        f"critic/{name}/{what}": getattr(score_b, what)().item()
        for name in ("score", "rewards")
        for what in ("mean", "max", "min")
    }


def _mean(values: torch.Tensor) -> float:
    return values.double().mean().item()
