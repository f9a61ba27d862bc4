"""A reward for random text, the parity of its bytes, for policies with random weights, which give no answers."""

from __future__ import annotations

from verl_credit.turns.rollout.reward.qa import compute_score as score


def compute_score(
    data_source: str, solution_str: str, ground_truth, extra_info=None, **options
) -> dict[str, float]:
    coin = float(sum(solution_str.encode()) % 2)
    return {**score(data_source, solution_str, ground_truth, extra_info, **options), "score": coin}
