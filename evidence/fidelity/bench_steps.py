"""How many steps tell two credits apart: t of the mean over a run's first steps, over pairs of seed and world.

python evidence/fidelity/bench_steps.py NEW          # the runs of gigpo_factorial.yaml
"""

import sys
from pathlib import Path

import numpy as np

from verl_credit.bench.learning import METRIC
from verl_credit.run.files import METRICS, read_json_lines


def curves(folder: Path) -> np.ndarray:
    """[run, step], in the order of the runs' names."""
    runs = sorted(folder.glob("seed-*"))
    return np.array([[row[METRIC] for row in read_json_lines(run / METRICS)] for run in runs])


if __name__ == "__main__":
    apart = curves(Path(sys.argv[1]) / "half_negative") - curves(Path(sys.argv[1]) / "grpo")
    for steps in (8, 10, 12, 15, 20):
        d = 100 * apart[:, :steps].mean(axis=1)
        print(f"{steps} steps: {d.mean():+.2f} points, t = {d.mean() / d.std(ddof=1) * len(d) ** 0.5:.1f}")
