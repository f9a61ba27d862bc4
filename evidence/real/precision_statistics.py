"""How far gains from other scores are from exact ones, as errors and as what a turn mode makes of them."""

from __future__ import annotations

import numpy as np
import torch
from gain_statistics import flips, groups_of

from verl_credit.credit.groups import z_score
from verl_credit.credit.turn.info_gain import INFO_GAIN_TYPES


def errors(exact: list[dict], tables: list[list[list[float]]]) -> dict:
    """``exact``: questions of gains.json; ``tables``: per question the other scores, [rollouts, contexts]."""
    apart = np.concatenate([
        (np.array(table) - np.array([row["scores"] for row in known["rows"]])).ravel()
        for known, table in zip(exact, tables, strict=True)
    ])  # fmt: skip
    report = {"score_error_nats": {"std": apart.std(), "mean": apart.mean(), "largest": np.abs(apart).max()}}
    for info_gain_type in INFO_GAIN_TYPES:
        right, found = gains(exact, tables, info_gain_type)
        report[info_gain_type] = compare(right, found)
    return {key: {name: _plain(value) for name, value in of.items()} for key, of in report.items()}


def scorers_apart(scores: list[dict], variant: str) -> dict:
    """Difference of the scores of `branch` and `rows` in one variant, in nats."""
    apart = np.concatenate([
        (np.array(question[variant]["branch"]) - np.array(question[variant]["rows"])).ravel() for question in scores
    ])  # fmt: skip
    return {"std": float(apart.std()), "largest": float(np.abs(apart).max())}


def gains(exact: list[dict], tables: list, info_gain_type: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The gains of every question's rollouts in every turn, exact and other: what turn modes compare."""
    right, found = [], []
    for known, table in zip(exact, tables, strict=True):
        rows = [
            {"pages": row["pages"], "scores": other} for row, other in zip(known["rows"], table, strict=True)
        ]
        right += groups_of(known["rows"], info_gain_type)
        found += groups_of(rows, info_gain_type)
    return right, found


def compare(right: list[np.ndarray], found: list[np.ndarray]) -> dict:
    """Errors of gains. A group: the rollouts of a question, in one turn.

    spread_in_a_group: root mean square of a gain minus its group's mean; the error over it is centred, too. z_error: root
    mean square of the difference of both z-scores in the group.
    """
    r, f = np.concatenate(right), np.concatenate(found)
    centred, centred_found = (np.concatenate([of - of.mean() for of in groups]) for groups in (right, found))
    spread = np.sqrt((centred**2).mean())
    all_pairs, clear = (
        np.array([flips(a, b, gap) for a, b in zip(right, found, strict=True)]).sum(axis=0)
        for gap in (0.0, 0.1 * spread)
    )
    group = torch.tensor([number for number, of in enumerate(right) for _ in of])
    z, z_found = (z_score(torch.from_numpy(of), group).numpy() for of in (r, f))
    apart = np.split(z_found - z, np.cumsum([len(of) for of in right])[:-1])
    z_errors = np.array([np.sqrt((of**2).mean()) for of in apart])
    least = np.argsort([of.std() for of in right])[: len(right) // 4]
    return {
        "gains": len(r),
        "correlation": np.corrcoef(r, f)[0, 1],
        "spread": r.std(),
        "error_std": (f - r).std(),
        "error_over_spread": (f - r).std() / r.std(),
        "spread_in_a_group": spread,
        "error_over_spread_in_a_group": np.sqrt(((centred_found - centred) ** 2).mean()) / spread,
        "largest_error": np.abs(f - r).max(),
        "pairs": all_pairs[1],
        "pairs_flipped": all_pairs[0] / all_pairs[1],
        "pairs_apart_by_a_tenth_of_the_spread_in_a_group": clear[1],
        "of_these_flipped": clear[0] / clear[1],
        "sign_of_the_centred_gain_flipped": (centred * centred_found < 0).mean(),
        "z_error": np.sqrt(((z_found - z) ** 2).mean()),
        "z_error_in_the_quarter_of_groups_with_the_least_spread": np.sqrt((z_errors[least] ** 2).mean()),
        "largest_z_error_of_a_group": z_errors.max(),
    }


def _plain(value) -> float | int:
    return int(value) if isinstance(value, int | np.integer) else float(value)
