"""The campaign of curves.yaml, a folder for each horizon: area and held-out exact match, with Holm over all of them.

    python evidence/horizon/curves.py FOLDER [FOLDER ...]

Prints for each declared comparison the mean difference over the pairs of seed and world, half of Student's 95 % interval,
how many pairs are above, and p of Student's test, by itself and after Holm. The areas are a family of comparisons, and
held-out questions, greedy and sampled, another. A pair that lacks a run is left out.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from scipy import stats
from statsmodels.stats.multitest import multipletests

from verl_credit.records.run.files import VALIDATION, read_json_lines
from verl_credit.study.campaign.record import read_record
from verl_credit.study.campaign.state import states

MEASURES = {
    "area": None,
    "greedy": "val-aux/lab-greedy/em/mean@1",
    "sampled": "val-aux/lab-sampled/em/mean@1",
}
Found = dict[str, dict[tuple[int, int], float]]
"""Condition -> (seed, world) -> value."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="+")
    for folder in parser.parse_args().folders:
        print("\n".join([f"\n{folder.name}\n", *table(folder)]))


def table(folder: Path) -> list[str]:
    campaign = read_record(folder).campaign
    compared = campaign.pairs()
    rows = [
        [measure, *pair, *difference(found[pair[0]], found[pair[1]])]
        for measure, found in values(folder).items()
        for pair in compared
    ]
    lines = [
        "| measure | comparison | points | pairs above | p | p, Holm |",
        "|---|---|---|---|---|---|",
    ]
    for family in (("area",), ("greedy", "sampled")):
        own = [row for row in rows if row[0] in family]
        holm = multipletests([p if np.isfinite(p) else 1.0 for *_, p in own], method="holm")[1]
        for (measure, a, b, mean, half, above, n, p), corrected in zip(own, holm, strict=True):
            cells = [f"{measure}, {n} pairs", f"{a} - {b}", f"{mean:+.1f} ± {half:.1f}", f"{above} of {n}"]
            lines.append(f"| {' | '.join([*cells, f'{p:.4f}', f'{corrected:.4f}'])} |")
    return lines


def values(folder: Path) -> dict[str, Found]:
    """In points; held-out values are those after the last step."""
    campaign = read_record(folder).campaign
    found = {measure: {name: {} for name in campaign.conditions} for measure in MEASURES}
    for state in states(campaign, folder):
        if state.value is None:
            continue
        last = read_json_lines(folder / state.run.folder / VALIDATION)[-1]
        for measure, key in MEASURES.items():
            value = state.value if key is None else last[key]
            found[measure][state.run.condition][state.run.seed, state.run.world] = 100 * value
    return found


def difference(a: dict, b: dict) -> tuple[float, float, int, int, float]:
    """(mean, half of the interval, pairs above, pairs, p)"""
    apart = np.array([a[block] - b[block] for block in sorted(a.keys() & b.keys())])
    n = len(apart)
    if n < 2:
        return float(apart.mean()) if n else np.nan, np.nan, int((apart > 0).sum()), n, np.nan
    half = stats.t.ppf(0.975, n - 1) * apart.std(ddof=1) / n**0.5
    return (
        float(apart.mean()),
        float(half),
        int((apart > 0).sum()),
        n,
        float(stats.ttest_1samp(apart, 0).pvalue),
    )


if __name__ == "__main__":
    main()
