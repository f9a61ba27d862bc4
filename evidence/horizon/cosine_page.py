"""The tables of what `cosine.py` measured."""

from __future__ import annotations

from statistics import fmean

import numpy as np
from scipy import stats

LAMS = (0.5, 0.8)
GRPO = "none, grpo"
SHOWN = [
    "none, half_negative",
    "gigpo",
    "turn-group-v1d, alpha 0.3",
    "turn-group-unbiased, alpha 0.3",
    "joint",
    "separate",
    "calibadv",
    "calibadv, lapo",
    "turn-group-v1d, lapo, alpha 0.3",
    "g2po",
    "gagpo",
    "trace, frozen start",
    "cigpo, frozen start",
    "turn-group-v1d, provenance, alpha 0.3",
    "calibadv, provenance",
]
SHOWN += [
    f"turn_gae, true values, lam {lam}" for lam in ("0", "0.5", "0.8", "1", "0.5, halved", "0.8, halved")
]
SHOWN += [
    f"turn_gae, learned ({of}), lam {lam:g}{how}"
    for of in ("group", "features")
    for lam in LAMS
    for how in ("", ", halved")
]


def page(rows: list[dict]) -> str:
    """For every horizon, and for all policies, the mean of own cosine minus GRPO's; "(2 of 5)" is on 2 of 5 policies. ± is
    by the jackknife over questions, as if policies were independent. Those of one run are not, so the number of runs stands
    beside."""
    of = by_horizon(rows)
    heads = list(of)
    lines = [f"| own cosine minus GRPO's | {' | '.join(heads)} |", "|---" * (1 + len(of)) + "|"]

    def line(name: str, cells: list[str]) -> None:
        lines.append(f"| {name} | {' | '.join(cells)} |")

    line("policies of runs", [f"{len(some)} of {len({one['run'] for one in some})}" for some in of.values()])
    for name, key in (("right", "right"), ("turns", "turns")):
        line(name, [f"{fmean(one[key] for one in some):.2f}" for some in of.values()])
    line(
        "GRPO's own cosine", [mean_of([one["own"]["none, grpo"] for one in some], "") for some in of.values()]
    )
    for name in (name for name in SHOWN if any(name in one["own_difference"] for one in rows)):
        line(name, [mean_of([one["own_difference"].get(name) for one in some], "+") for some in of.values()])
    for name, place in (("EV of V", 0), ("EV of changes", 1)):
        for features in ("group", "features"):
            line(f"{name}, {features}", [share(some, features, place) for some in of.values()])
    line("minutes of a policy", [f"{fmean(one['seconds'] for one in some) / 60:.1f}" for some in of.values()])
    return "\n".join(lines)


def share(rows: list[dict], features: str, place: int) -> str:
    known = [row["explained"][features][place] for row in rows]
    return "undefined" if None in known else f"{fmean(known):.2f}"


def by_horizon(rows: list[dict]) -> dict[str, list[dict]]:
    of = {}
    for row in sorted(rows, key=lambda row: str(row["hops"])):
        of.setdefault(f"H {row['hops']}" if isinstance(row["hops"], int) else row["hops"], []).append(row)
    return of | ({"all": rows} if len(of) > 1 else {})


def above(rows: list[dict], name: str) -> str:
    """Own cosine of the credit ``name`` minus that of every credit which knows no value: the mean over the policies, half of
    Student's 95 % interval with policies as units, and on how many it is above."""
    of = by_horizon(rows)
    lines = [f"| {name} minus | {' | '.join(of)} |", "|---" * (1 + len(of)) + "|"]
    for other in [GRPO, *(one for one in SHOWN if "turn_gae" not in one)]:
        cells = []
        for some in of.values():
            own = [[row["own"].get(one, [None])[0] for one in (name, other)] for row in some]
            apart = np.array([a - b for a, b in own if a is not None and b is not None])
            n = len(apart)
            half = stats.t.ppf(0.975, n - 1) * apart.std(ddof=1) / n**0.5 if n > 1 else np.nan
            cells.append(
                f"{apart.mean():+.3f} ± {half:.3f} ({(apart > 0).sum()} of {n})" if n else "undefined"
            )
        lines.append(f"| {other} | {' | '.join(cells)} |")
    return "\n".join(lines)


Measures = list[list[float | None] | None]
"""[value, low, high] of each policy"""


def mean_and_half(measures: Measures) -> tuple[float, float] | None:
    known = [one for one in measures if one is not None and None not in one]
    if not known:
        return None
    half = sum(((high - low) / 2) ** 2 for _, low, high in known) ** 0.5 / len(known)
    return fmean(value for value, _, _ in known), half


def mean_of(measures: Measures, sign: str) -> str:
    found, known = mean_and_half(measures), sum(one is not None for one in measures)
    on = "" if known == len(measures) else f" ({known} of {len(measures)})"
    return "undefined" if found is None else f"{found[0]:{sign}.3f} ± {found[1]:.3f}{on}"
