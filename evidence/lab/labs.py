"""The lab after the warm start: python evidence/lab/labs.py --seeds 0 1 2 3 4 [--labs DIR] [--out FILE]

Builds (or reuses) the lab of every world seed. Writes its manifest's measurements of the policy on dev questions, and how
often the encoder finds the first hop's article for a test question.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from verl_credit.worlds.lab.build import build_lab
from verl_credit.worlds.lab.config import SIZES
from verl_credit.worlds.lab.evaluate import LocalRetriever, recall
from verl_credit.worlds.lab.world import make_splits, make_world


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--labs", type=Path, default=Path.home() / ".cache/verl_credit/lab")
    parser.add_argument("--out", type=Path, default=Path("runs/evidence/results/labs.json"))
    arguments = parser.parse_args()
    labs = [measure(seed, arguments.labs / f"full-{seed}") for seed in arguments.seeds]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(labs, indent=1) + "\n")


def measure(seed: int, directory: Path) -> dict:
    lab = build_lab(directory, world_seed=seed)
    size = SIZES["full"].world
    test = make_splits(make_world(seed, size), size, seed)["test"]
    first_hop = [question.gold_ids[0] for question in test]
    retriever = LocalRetriever(lab.encoder, lab.index)
    return {
        "world_seed": seed,
        "test_recall_by_question": recall(retriever, [question.text for question in test], first_hop),
        "test_recall_by_call": recall(
            retriever, [f" {question.path[0]} {question.relations[0]}" for question in test], first_hop
        ),
        **json.loads(lab.manifest.read_text())["measured"],
    }


if __name__ == "__main__":
    main()
