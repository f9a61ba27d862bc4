"""The age of the weights that wrote each turn, and the ratio of its tokens by age.

A turn's age is the number of versions of the weights between those that began it and those that are trained now: at step s
these are version s - 1.

    age[b, k]  = s - 1 - first version of turn k of row b
    off(a)     = mean over the tokens t of turns of age a of |exp(now[t] - written[t]) - 1|

``now``: log-prob of a token by the policy before the step's update; ``written``: by the policy that wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence

from verl_credit.lazy import torch
from verl_credit.turns.rollout.book import TurnBatch

NAME = "credit/staleness"
UNKNOWN = -1


def staleness_metrics(
    turns: TurnBatch,
    *,
    step: int,
    now_B_T: torch.Tensor | None = None,
    written_B_T: torch.Tensor | None = None,
) -> dict[str, float]:
    """The metrics over the turns of valid rows.

    A turn whose record has no versions is counted in ``turns_unknown`` and is in no other metric.
    Without the log-probs no ratios are measured. Errors: ValueError for a turn of weights that are newer than this step's.
    """
    row_valid_B, n_turns_B, turn_ids_B_T = turns.row_valid_B, turns.n_turns_B, turns.turn_ids_B_T
    age_B_K, spans_B_K = _ages(turns.records, n_turns_B, step)
    turns_B_K = row_valid_B[:, None] & (torch.arange(age_B_K.shape[1]) < n_turns_B[:, None])
    known_B_K = turns_B_K & (age_B_K != UNKNOWN)
    metrics: dict[str, float] = {f"{NAME}/turns_unknown": int((turns_B_K & ~known_B_K).sum())}
    if not known_B_K.any():
        return metrics
    ages = age_B_K[known_B_K].double()
    metrics[f"{NAME}/mean"] = ages.mean().item()
    metrics[f"{NAME}/oldest"] = ages.max().item()
    metrics[f"{NAME}/turns_of_two_versions"] = int((spans_B_K[known_B_K] > 1).sum())
    for turn in range(age_B_K.shape[1]):
        if known_B_K[:, turn].any():
            metrics[f"{NAME}/turn_{turn}"] = age_B_K[known_B_K[:, turn], turn].double().mean().item()
    if now_B_T is None or written_B_T is None:
        return metrics
    token_age_B_T = age_B_K.gather(1, turn_ids_B_T.clamp(min=0))
    counted_B_T = (turn_ids_B_T >= 0) & row_valid_B[:, None]
    off_B_T = (now_B_T.double() - written_B_T.double()).exp().sub(1).abs()
    for age in ages.unique().int().tolist():
        chosen_B_T = counted_B_T & (token_age_B_T == age)
        metrics[f"{NAME}/tokens_at_age_{age}"] = int(chosen_B_T.sum())
        metrics[f"{NAME}/ratio_off_at_age_{age}"] = off_B_T[chosen_B_T].mean().item()
    return metrics


def _ages(records: Sequence[dict], n_turns_B: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(age_B_K, spans_B_K): age of each turn, and how many versions wrote it; UNKNOWN where the record has none."""
    n_turns = n_turns_B.tolist()
    shape = len(n_turns), max([1, *n_turns])
    age_B_K, spans_B_K = torch.full(shape, UNKNOWN), torch.full(shape, UNKNOWN)
    for row, record in enumerate(records):
        for turn, (first, last) in enumerate(record["versions"][: n_turns[row]]):
            if first is None or last is None:
                continue
            if last > step - 1:
                raise ValueError(
                    f"row {row}: weights of version {last} wrote turn {turn}; step {step} trains version {step - 1}"
                )
            age_B_K[row, turn], spans_B_K[row, turn] = step - 1 - first, last - first + 1
    return age_B_K, spans_B_K
