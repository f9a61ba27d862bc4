"""Each token operator against none in sepa_factorial_twin: six comparisons, and Holm over them. Only C8 - C5 was declared.

python evidence/campaigns/token_against_none.py build/evidence/campaigns/sepa_factorial_twin
"""

import sys
from pathlib import Path

from statsmodels.stats.multitest import multipletests

from verl_credit.study.campaign.record import read_record
from verl_credit.study.campaign.state import states
from verl_credit.study.campaign.statistics import compare

PAIRS = [("C2", "C1"), ("C3", "C1"), ("C4", "C1"), ("C6", "C5"), ("C7", "C5"), ("C8", "C5")]

if __name__ == "__main__":
    folder, areas = Path(sys.argv[1]), {}
    for state in states(read_record(folder).campaign, folder):
        areas.setdefault(state.run.condition, {})[state.run.seed] = 100 * state.value
    found = [compare(a, b, areas[a], areas[b]) for a, b in PAIRS]
    holm = multipletests([c.p for c in found], method="holm")[1]
    print(
        "| difference | points | 95 % interval (BCa) | p, sign flips | p, Holm over 6 |\n|---|---|---|---|---|"
    )
    for c, p in zip(found, holm, strict=True):
        d = c.difference
        print(f"| {c.a} - {c.b} | {d.mean:+.2f} | {d.low:+.2f} to {d.high:+.2f} | {c.p:.4f} | {p:.3f} |")
