"""GiGPO and credit below 0 at half weight on seeds that chose neither: areas under the curve and held-out exact match.

    cd evidence/fidelity && verl-credit campaign run gigpo_factorial.yaml --parallel 2 --dir NEW
    python evidence/fidelity/gigpo_factorial.py NEW RUNS

RUNS: of the campaign credit_learning_twin (seeds 1 to 5). Differences are of runs with the same seed and world, in points,
with half of Student's 95 % interval. Writes gigpo_factorial.json beside this file and prints its tables.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from learning import Areas, areas_of, held_out_of
from scipy import stats

OUT = Path(__file__).with_name("gigpo_factorial.json")
PAIRS = (
    ("half_negative", "grpo"),
    ("gigpo", "grpo"),
    ("gigpo_half_negative", "grpo"),
    ("gigpo_half_negative", "half_negative"),
    ("half_negative", "gigpo"),
)


def measures(runs: Path) -> dict[str, Areas]:
    held_out = {f"held out, {mode}": of for mode, of in held_out_of(runs).items()}
    return {"area": areas_of(runs), **held_out}


def difference(one: str, other: str, campaigns: list[Areas]) -> dict | None:
    """Of runs with the same seed and world; None where there are none."""
    found = [
        areas[one][pair] - areas[other][pair]
        for areas in campaigns
        for pair in sorted(areas.get(one, {}).keys() & areas.get(other, {}).keys())
    ]
    if not found:
        return None
    d = 100 * np.array(found)
    half = stats.t.ppf(0.975, len(d) - 1) * d.std(ddof=1) / len(d) ** 0.5
    above = int((d > 0).sum())
    return {
        "pairs": len(d),
        "above": above,
        "mean": float(d.mean()),
        "half": float(half),
        "p": float(stats.ttest_1samp(d, 0.0).pvalue),
    }


def main() -> None:
    new, old = (measures(Path(folder)) for folder in sys.argv[1:3])
    asked = {"seeds 6 to 10": [new], "seeds 1 to 10": [new, old]}
    result = {
        f"{name}, {measure}": {
            f"{one} - {other}": found
            for one, other in PAIRS
            if (found := difference(one, other, [campaign[measure] for campaign in campaigns]))
            and (name == "seeds 6 to 10" or found["pairs"] > 15)
        }
        for name, campaigns in asked.items()
        for measure in new
    }
    means = {c: float(np.mean(list(of.values()))) for c, of in new["area"].items()}
    runs = "".join(
        f"  {json.dumps(name)}: {json.dumps([[round(x, 6) for x in row] for row in rows_of(new, name)])},\n"
        for name in means
    )
    rest = json.dumps({"areas": means, **result}, indent=1)
    OUT.write_text('{\n "runs": {\n' + runs.rstrip(",\n") + "\n },\n" + rest.lstrip("{\n") + "\n")
    for name, rows in result.items():
        print(f"\n{name}\n")
        for pair, d in rows.items():
            print(
                f"| {pair} | {d['mean']:+.1f} ± {d['half']:.1f} | {d['p']:.2g} | {d['above']} of {d['pairs']} |"
            )


def rows_of(campaign: dict[str, Areas], condition: str) -> list[list[float]]:
    """[seed, world, area, held out greedy, held out sampled]."""
    return [
        [*pair, *(of[condition][pair] for of in campaign.values())]
        for pair in sorted(campaign["area"][condition])
    ]


if __name__ == "__main__":
    main()
