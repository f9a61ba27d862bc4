"""Exact match on held-out questions after the last step, with differences of pairs: not the measure of a campaign.

python evidence/campaigns/held_out.py build/evidence/campaigns/sepa_factorial_twin    # after make evidence-raw
"""

import sys
from pathlib import Path

import numpy as np
from scipy import stats

from verl_credit.records.run.files import VALIDATION, read_json_lines
from verl_credit.study.campaign.record import read_record

MODES = ("greedy", "sampled")


def last(folder: Path, condition: str) -> dict[str, np.ndarray]:
    """{run: percent right by mode} of a condition's runs."""
    rows = {run.name: read_json_lines(run / VALIDATION)[-1] for run in (folder / condition).glob("seed-*")}
    return {
        name: 100 * np.array([row[f"val-aux/lab-{mode}/em/mean@1"] for mode in MODES])
        for name, row in rows.items()
    }


def difference(one: dict, other: dict) -> list[str]:
    """Mean, half of Student's 95 % interval, pairs above 0, for each mode."""
    apart = np.array([one[run] - other[run] for run in sorted(one.keys() & other.keys())])
    half = stats.t.ppf(0.975, len(apart) - 1) * apart.std(axis=0, ddof=1) / len(apart) ** 0.5
    above = (apart > 0).sum(axis=0)
    return [
        f"{m:+.1f} ± {h:.1f} ({a} of {len(apart)})"
        for m, h, a in zip(apart.mean(axis=0), half, above, strict=True)
    ]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    campaign = read_record(folder).campaign
    found = {name: last(folder, name) for name in campaign.conditions}
    others = [name for name in found if name != campaign.baseline]
    print("| condition | " + " | ".join(MODES) + " |\n|---|---|---|")
    for name, runs in found.items():
        print(
            f"| {name} | " + " | ".join(f"{mean:.1f} %" for mean in np.mean([*runs.values()], axis=0)) + " |"
        )
    print("\n| difference | " + " | ".join(MODES) + " |\n|---|---|---|")
    pairs = [(name, campaign.baseline) for name in others]
    pairs += [pair for pair in map(tuple, campaign.comparisons) if pair not in pairs]
    for one, other in pairs:
        print(f"| {one} - {other} | {' | '.join(difference(found[one], found[other]))} |")
