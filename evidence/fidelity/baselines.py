"""How high should the baseline be? Own cosine of r - share x (mean of the other rollouts), and the length of the score.

    python evidence/fidelity/baselines.py RUN [RUN ...] --steps 0,5,10,20

RUNs are runs of the lab with these steps kept. Of every policy: 96 questions of the training set with 8 rollouts each
and 8 more for the replicate, 16 continuations of each context; then own cosine (docs/fidelity.md) minus GRPO's for
each credit, and the squared length of the score s = grad log pi(trajectory), of right and of wrong rollouts, over
questions that have both. The baseline with the least noise of a question's gradient is E[r |s|^2] / E[|s|^2]. Writes
baselines.json beside this file.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from verl_credit.commands.fidelity_policies import policies_of
from verl_credit.credit import grpo, half_negative, low_baseline, maxrl
from verl_credit.fidelity.credit import Advantages
from verl_credit.fidelity.gradient.agreement import replicate_groups, score_without_gains
from verl_credit.fidelity.gradient.alignment import Alignment
from verl_credit.fidelity.gradient.sums import Groups, credited, tokens_of, true_credit
from verl_credit.fidelity.gradient.turns import TurnGradients, turn_gradients
from verl_credit.fidelity.measure import sample_groups
from verl_credit.fidelity.subject import Subject
from verl_credit.fidelity.values import states_of, values_of

OUT = Path(__file__).with_suffix(".json")
PROMPTS, ROLLOUTS, CONTINUATIONS = 96, 8, 16
CREDITS = {
    "grpo": grpo,
    **{f"share {share:g}": lambda r, g, share=share: low_baseline(r, g, share=share) for share in (0, 0.25, 0.5, 0.75, 1)},
    "half_negative": half_negative,
    "maxrl": maxrl,
}  # fmt: skip


def measured(subject: Subject) -> dict:
    groups = sample_groups(subject, rollouts=ROLLOUTS, seed=0)
    again = replicate_groups(subject, rollouts=ROLLOUTS, seed=0)
    values = values_of(states_of([*groups, *again]), subject.roll, continuations=CONTINUATIONS, seed=0)
    gradients = turn_gradients(subject.model, [path for group in (*groups, *again) for path in group])
    sums = {
        name: credited(groups, gradients, of_outcomes(groups, function)) for name, function in CREDITS.items()
    }
    true, replicate = (
        true_credit(rows, gradients, score_without_gains(rows, values)) for rows in (groups, again)
    )
    alignment = Alignment(true, replicate, tokens_of(groups), sums["grpo"])
    found = {name: alignment.of(of) for name, of in {**sums, "true advantages": true}.items()}
    return {
        "right": fmean(path.reward for group in groups for path in group),
        "own_cosine_of_grpo": asdict(found["grpo"].own),
        "minus_grpo": {name: asdict(of.own_difference) for name, of in found.items()},
        "signal_to_noise": {name: asdict(of.signal_to_noise) for name, of in found.items()},
        "score": scores(groups, gradients),
    }


def of_outcomes(groups: Groups, function) -> Advantages:
    found = []
    for group in groups:
        outcome_B = torch.tensor([path.reward for path in group], dtype=torch.float64)
        advantage_B = function(outcome_B, torch.zeros(len(group), dtype=torch.long)).tolist()
        found.append([[a] * len(path.steps) for a, path in zip(advantage_B, group, strict=True)])
    return found


def scores(groups: Groups, gradients: TurnGradients) -> dict:
    """Means over the questions that have right and wrong rollouts."""
    right, wrong, best, mean = [], [], [], []
    for group in groups:
        r = np.array([path.reward for path in group])
        if 0 < r.mean() < 1:
            places = [[gradients.of(step) for step in path.steps] for path in group]
            square = np.array([(gradients.sketch_N_S[p].sum(0, dtype=np.float64) ** 2).sum() for p in places])
            right.append(square[r == 1].mean())
            wrong.append(square[r == 0].mean())
            best.append((r * square).sum() / square.sum())
            mean.append(r.mean())
    return {
        "questions": len(mean),
        "square_right": fmean(right),
        "square_wrong": fmean(wrong),
        "best_baseline": fmean(best),
        "mean_outcome": fmean(mean),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--steps", default="0,5,10,20")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = json.loads(OUT.read_text()) if OUT.exists() else []
    steps = [int(step) for step in args.steps.split(",")]
    for run in args.runs:
        for policy in policies_of(run, steps, None):
            if any((row["run"], row["policy"]) == (run.name, policy.name) for row in rows):
                continue
            rows.append(
                {
                    "run": run.name,
                    "policy": policy.name,
                    **measured(policy.load(lab=None, split="train", prompts=PROMPTS)),
                }
            )
            OUT.write_text(json.dumps(rows, indent=1) + "\n")
            print(
                run.name, rows[-1]["policy"], f"right {rows[-1]['right']:.3f}", rows[-1]["score"], flush=True
            )
            for name, of in rows[-1]["minus_grpo"].items():
                if of["value"] is not None:
                    print(
                        f"  {name:16s} {of['value']:+.3f} ({of['low']:+.3f} to {of['high']:+.3f})", flush=True
                    )


if __name__ == "__main__":
    main()
