"""Exact match of kept policies on all 512 held-out questions of the lab, greedy and sampled.

    python evidence/fidelity/held_out.py RUN [RUN ...] --steps 5,10

RUNs are runs of the twin in the recipe `lab` that kept these steps. Prints a line for each policy.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from verl_credit.cli.saved_run import run_config
from verl_credit.recipe.compose import load_config
from verl_credit.records.run.files import VALIDATION, read_json_lines
from verl_credit.study.twin import Twin


def held_out(run: Path, step: int) -> dict:
    policy = run / "checkpoints" / f"global_step_{step}" / "actor" / "huggingface"
    with tempfile.TemporaryDirectory() as folder:
        lab = run_config(run).lab.dir
        own = [f"lab.dir={lab}", f"run_dir={folder}", f"actor_rollout_ref.model.path={policy}"]
        config = load_config("lab", [*own, "data.val_max_samples=-1", "seed=99"])
        Twin(config, Path(folder), lambda text: None).evaluate(step)
        return list(read_json_lines(Path(folder) / VALIDATION))[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--steps", default="5,10")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for run in args.runs:
        for step in map(int, args.steps.split(",")):
            print(f"{run.parent.name}/{run.name}", held_out(run, step), flush=True)


if __name__ == "__main__":
    main()
