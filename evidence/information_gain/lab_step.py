"""A whole lab step with information gain beside the same step without: python evidence/information_gain/lab_step.py

The learning rate is 0, so that all runs make the same rollouts; they differ only in whether gains are measured
(`algorithm.info_gain_warmup_steps`). Runs alternate; the ratio is of sums over steps 2 and later of medians over runs.
Metrics that do not depend on the credit must be equal.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from pathlib import Path

from verl_credit.run.files import METRICS, read_json_lines

STEPS = 6
SETTINGS = [
    f"trainer.total_training_steps={STEPS}",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "actor_rollout_ref.actor.optim.lr=0",
]
VARIANTS = {
    "branch": [],
    "rows": ["algorithm.info_gain_scorer=rows"],
    "without": [f"algorithm.info_gain_warmup_steps={STEPS}"],
}
TIMES = (
    "timing_s/step",
    "timing_s/old_log_prob",
    "timing_s/gen",
    "timing_s/update_actor",
    "credit/gain/seconds",
)
SAME = ("credit/outcome/em", "credit/turns_per_row", "response_length/mean")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lab", type=Path, required=True, help="folder of a built lab")
    parser.add_argument("--runs", type=Path, default=Path("runs/lab_step"))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, list[list[dict]]] = {name: [] for name in VARIANTS}
    for repeat in range(arguments.repeats):
        for name, overrides in VARIANTS.items():
            run_dir = (arguments.runs / f"{name}-{repeat}").resolve()
            command = [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "verl_credit.cli",
                "train",
                "--config-name",
                "lab",
            ]
            settings = [f"lab.dir={arguments.lab.resolve()}", f"run_dir={run_dir}", *SETTINGS, *overrides]
            subprocess.run([*command, *settings], check=True, stdout=subprocess.DEVNULL)
            found[name].append(read_json_lines(run_dir / METRICS))
    first = found["branch"][0]
    for runs in found.values():
        for rows in runs:
            assert [[row[name] for name in SAME] for row in rows] == [
                [row[name] for name in SAME] for row in first
            ]
    seconds = {
        name: {
            key: round(
                sum(
                    statistics.median(rows[step].get(key) or 0.0 for rows in runs) for step in range(1, STEPS)
                )
                / (STEPS - 1),
                3,
            )
            for key in TIMES
        }
        for name, runs in found.items()
    }
    ratio = {
        name: round(seconds[name]["timing_s/step"] / seconds["without"]["timing_s/step"], 3)
        for name in VARIANTS
    }
    result = {"machine": platform.platform(), "seconds_per_step": seconds, "step_ratio": ratio}
    print(json.dumps(result, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
