"""Two lab steps under each condition of the factorial: python evidence/credit/factorial.py [--out FILE] [--lab DIR]

C1 to C4: GRPO without std, with token transform none, gtpo, gtpo_hicra, gtpo_sepa; C5 to C8: MaxRL with the same.
All start from the same policy with the same seed, so that the rollouts of step 1 are the same and only the credit differs.
SEPA's ramp is set to act at once (the published one begins after 50 steps).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from itertools import combinations
from pathlib import Path

from verl_credit.run.files import METRICS, read_json_lines

PRESETS = {
    "C1": "grpo_nostd",
    "C2": "grpo_gtpo",
    "C3": "grpo_gtpo_hicra",
    "C4": "grpo_gtpo_sepa",
    "C5": "maxrl",
    "C6": "maxrl_gtpo",
    "C7": "maxrl_gtpo_hicra",
    "C8": "maxrl_gtpo_sepa",
}
SETTINGS = [
    "trainer.total_training_steps=2",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "algorithm.sepa.delay_steps=0",
    "algorithm.sepa.steps=2",
    "algorithm.sepa.correct_rate_gate=0",
]
SAME = ("credit/outcome/em", "credit/turns_per_row")  # of step 1: the rollouts are the same
SHOWN = (
    "credit/advantage/token_std",
    "credit/token_weight/std",
    "credit/planning/token_share",
    "credit/sepa_lambda",
    "actor/pg_loss",
    "actor/grad_norm",
)
DIFFERENT = ("credit/advantage/token_std", "actor/grad_norm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "factorial.json")
    parser.add_argument("--lab", type=Path, help="folder of a built lab; none: the cache of `make demo`")
    parser.add_argument("--runs", type=Path, default=Path("runs/factorial"))
    parser.add_argument("--size", choices=("full", "tiny"), default="full")
    arguments = parser.parse_args()
    results = {}
    for condition, preset in PRESETS.items():
        run_dir = (arguments.runs / condition).resolve()
        overrides = [f"credit={preset}", f"lab.size={arguments.size}", *SETTINGS, f"run_dir={run_dir}"]
        overrides += [f"lab.dir={arguments.lab.resolve()}"] if arguments.lab else []
        command = [sys.executable, "-m", "verl_credit.cli", "train", "--config-name", "lab", *overrides]
        subprocess.run(command, check=True)
        rows = read_json_lines(run_dir / METRICS)
        results[condition] = {
            "preset": preset,
            "steps": [{name: row.get(name) for name in (*SAME, *SHOWN)} for row in rows],
        }
        print(condition, json.dumps(results[condition]["steps"][0]), flush=True)
    check(results)
    machine = {"cpus": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()}
    arguments.out.write_text(
        json.dumps({"machine": machine, "settings": SETTINGS, "conditions": results}, indent=1)
    )


def check(results: dict) -> None:
    """Assert equal rollouts at step 1, and different credit for every two conditions."""
    for (one, first), (other, second) in combinations(results.items(), 2):
        a, b = first["steps"][0], second["steps"][0]
        assert all(a[name] == b[name] for name in SAME), (one, other, a, b)
        assert any(abs(a[name] - b[name]) > 1e-6 * abs(a[name]) for name in DIFFERENT), (one, other, a, b)
    print("the rollouts of step 1 are the same; every two conditions credit them differently")


if __name__ == "__main__":
    main()
