"""The values of a measurement through a run's own rollouts, beside the sampler's of the same contexts.

    verl-credit fidelity RUN --steps 0 --engine run --prompts 12 --continuations 64 --dir OUT
    python evidence/fidelity/engines.py RUN OUT/step_0

Writes evidence/fidelity/engines.json. z is of two estimates of one chance, by their common one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from verl_credit.commands.fidelity_policies import policies_of
from verl_credit.fidelity.sampler import digest
from verl_credit.fidelity.values import VALUES, Value, values_of
from verl_credit.host.measure.rows import Row
from verl_credit.host.measure.subject import ROLLOUTS
from verl_credit.run.files import read_json_lines

HERE = Path(__file__).parent
CONTINUATIONS = 1024
"""Of the sampler: its error is small beside the other's."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    step = int(given.folder.name.removeprefix("step_"))
    lines = read_json_lines(given.folder / ROLLOUTS)
    (policy,) = policies_of(given.run, [step], None)
    subject = policy.load(lab=None, split="train", prompts=1 + max(line["question"] for line in lines))
    states = [state for line in lines for row in line["rows"] for state in Row(**row).states()]
    ours = values_of(states, subject.roll, continuations=CONTINUATIONS, seed=1)
    theirs = {row["context"]: Value(**row) for row in read_json_lines(given.folder / VALUES)}
    z = [z_of(theirs[digest(ids)], ours[digest(ids)]) for ids in {state.ids for state in states}]
    found = {
        "contexts": len(z),
        "continuations": next(iter(theirs.values())).continuations,
        "mean value, the run's rollouts": float(np.mean([value.value for value in theirs.values()])),
        "mean value, the sampler": float(np.mean([value.value for value in ours.values()])),
        "mean of z": float(np.mean(z)),
        "its error": len(z) ** -0.5,
        "standard deviation of z": float(np.std(z, ddof=1)),
    }
    text = json.dumps({name: round(value, 4) for name, value in found.items()}, indent=1)
    (HERE / "engines.json").write_text(text + "\n")
    print(text)


def z_of(one: Value, other: Value) -> float:
    n = one.continuations + other.continuations
    p = (one.successes + other.successes + 0.5) / (n + 1)
    return (one.value - other.value) / (p * (1 - p) * n / one.continuations / other.continuations) ** 0.5


if __name__ == "__main__":
    main()
