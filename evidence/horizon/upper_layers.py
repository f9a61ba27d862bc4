"""Does own cosine change when the gradient is over the upper third of the layers alone (`real_start.train_upper`)?

    python evidence/horizon/upper_layers.py FILE LAB/policy [--prompts 32] [--continuations 16]

The same rollouts and values of a policy of the lab, with both gradients. FILE (JSON) gets both, and what the last lines say.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from cosine import MEASURED, found_by
from real_start import train_upper
from scipy import stats

from verl_credit.cli.fidelity.policies import policies_of
from verl_credit.precision import one_thread
from verl_credit.records.run.files import plain, write_text
from verl_credit.records.run.progress import Throttled, say_at_once
from verl_credit.study.fidelity.measure import measure
from verl_credit.study.fidelity.request import Request


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("policy", type=Path)
    for name, size in (("--prompts", 32), ("--continuations", 16)):
        parser.add_argument(name, type=int, default=size)
    given = parser.parse_args()
    (policy,) = policies_of(given.policy, None, None)
    size = {"prompts": given.prompts, "continuations": given.continuations}
    request = Request(str(given.file.with_suffix("")), **size, rollouts=8, modes=MEASURED, gradient=True)
    found = {}
    with one_thread():
        subject = policy.load(lab=None, split="train", prompts=given.prompts)
        for name in ("all", "upper"):
            weights = train_upper(subject.model) if name == "upper" else list(subject.model.parameters())
            result = measure(subject, request, say=Throttled(say_at_once, name))
            found[name] = {"parameters": sum(w.numel() for w in weights)} | found_by(result, {})
    apart = {
        key: [(found["all"][key][credit][0], found["upper"][key][credit][0]) for credit in found["all"][key]]
        for key in ("own", "own_difference")
    }
    for key, pairs in apart.items():
        x, y = np.array([pair for pair in pairs if None not in pair], dtype=float).T
        says = f"{key}: {len(x)} credits, Pearson {np.corrcoef(x, y)[0, 1]:.3f}, Spearman {stats.spearmanr(x, y)[0]:.3f}"
        found[f"{key} says"] = (
            f"{says}, largest difference {abs(x - y).max():.3f}, mean {(y - x).mean():+.3f}"
        )
        print(found[f"{key} says"])
    write_text(given.file, json.dumps(plain(found), indent=1) + "\n")


if __name__ == "__main__":
    main()
