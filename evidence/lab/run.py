"""Measures learning on the lab: python evidence/lab/run.py --seeds 0 1 2 [--out DIR] [--labs DIR]

For each world seed the lab is built (or reused), then `verl-credit train --config-name lab` runs under each condition.
Held-out questions are the lab's test split, on which nothing was tuned. Each run writes one JSON file into --out when it
ends; `summarize.py` makes the tables.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from verl_credit.records.run.files import METRICS, VALIDATION, read_json_lines
from verl_credit.records.run.rollouts import read_samples
from verl_credit.worlds.lab.build import build_lab
from verl_credit.worlds.lab.protocol import gram_token_mask
from verl_credit_retriever.index.manifest import write_manifest
from verl_credit_retriever.index.search import SearchIndex

CONDITIONS = {
    "main": [],
    "shuffled": ["search.shuffle_seed=1"],
    "swapped": [],  # lab.index is set to an index with swapped contents
    "static_clip": [
        "actor_rollout_ref.actor.policy_loss.dynamic_clip=false",
        "trainer.total_training_steps=10",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--conditions", nargs="+", default=list(CONDITIONS), choices=CONDITIONS)
    parser.add_argument("--out", type=Path, default=Path("runs/evidence/results"))
    parser.add_argument("--labs", type=Path, default=Path.home() / ".cache/verl_credit/lab")
    parser.add_argument("--runs", type=Path, default=Path("runs/evidence"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for condition in arguments.conditions:
        for seed in arguments.seeds:
            lab = build_lab(arguments.labs / f"full-{seed}", world_seed=seed)
            run_dir = (arguments.runs / f"{condition}-{seed}").resolve()
            result = measure(condition, seed, lab, run_dir)
            target = arguments.out / f"{condition}-{seed}.json"
            target.write_text(json.dumps(result, indent=1) + "\n")
            print(target, flush=True)


def swap_contents(index: Path, out: Path, seed: int = 0) -> Path:
    """A copy of ``index`` in which every article keeps its title, id and vector but has another one's text.

    A query finds the same titles, but reads about something else. A policy that learns by reading cannot improve on
    this index; a policy that exploits anything else can. The permutation is one cycle, so no article keeps its text.

    Raises IndexMismatch when ``index`` is damaged, FileExistsError when ``out`` exists.
    """
    index, out = Path(index), Path(out)
    source = SearchIndex.load(index)
    documents = [source.documents[row] for row in range(len(source))]
    pages = [document["contents"].partition("\n") for document in documents]
    order = list(range(len(documents)))
    random.Random(f"swap {seed}").shuffle(order)
    text_of = {row: pages[other][2] for row, other in zip(order, order[1:] + order[:1], strict=True)}
    out.mkdir(parents=True)
    ends = [0]
    with open(out / "corpus.jsonl", "wb") as lines:
        for row, document in enumerate(documents):
            swapped = {"id": document["id"], "contents": f"{pages[row][0]}\n{text_of[row]}"}
            ends.append(ends[-1] + lines.write((json.dumps(swapped) + "\n").encode()))
    np.save(out / "offsets.npy", np.asarray(ends, dtype=np.int64), allow_pickle=False)
    shutil.copy(index / "index.faiss", out / "index.faiss")
    encoder = source.manifest["encoder"]
    write_manifest(out, kind=source.manifest["kind"], rows=len(documents), encoder=encoder)
    return out


def measure(condition: str, seed: int, lab, run_dir: Path) -> dict:
    overrides = [
        f"lab.world_seed={seed}",
        f"lab.dir={lab.root}",
        f"run_dir={run_dir}",
        "keep_rollouts={steps: 100000, groups: null}",
        *CONDITIONS[condition],
    ]
    if condition == "swapped":
        swapped = run_dir / "swapped_index"
        if not swapped.exists():
            swap_contents(lab.index, swapped, seed=seed)
        overrides.append(f"lab.index={swapped}")
    command = [sys.executable, "-m", "verl_credit.cli", "train", "--config-name", "lab", *overrides]
    start = time.monotonic()
    subprocess.run(command, check=True)
    seconds = time.monotonic() - start
    metrics, (trajectories, _) = read_json_lines(run_dir / METRICS), read_samples(run_dir)
    return {
        "condition": condition,
        "world_seed": seed,
        "command": "verl-credit train --config-name lab " + " ".join(overrides),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "seconds": round(seconds, 1),
        "held_out": [held_out(row) for row in read_json_lines(run_dir / VALIDATION)],
        "train_em": [row["credit/outcome/em"] for row in metrics],
        "pg_clipfrac": [row["actor/pg_clipfrac"] for row in metrics],
        "ppo_kl": [row["actor/ppo_kl"] for row in metrics],
        "entropy": [row["actor/entropy"] for row in metrics],
        "clip_scale_std": [row.get("credit/clip_scale/std") for row in metrics],
        "seconds_per_step": [row["timing_s/step"] for row in metrics],
        "seconds_gain": [row.get("timing_s/info_gain") for row in metrics],
        "gain": gain_by_kind(trajectories, last_step=5),
        "gram_token_share": gram_token_share(trajectories, lab.policy),
    }


def held_out(row: dict) -> dict:
    result = {"step": row["step"]}
    for mode in ("greedy", "sampled"):
        em, formatted = (
            next(v for k, v in row.items() if k.endswith(f"lab-{mode}/{name}/mean@1"))
            for name in ("em", "format_ok")
        )
        result[mode] = {
            "em": em,
            "formatted": formatted,
            "em_formatted": em / formatted if formatted else None,
        }
    return result


def gain_by_kind(rows: list[dict], last_step: int) -> dict:
    """Gains of the first steps by what the turn's search brought, for the first time in its trajectory."""
    gains: dict[str, list[float]] = {"answer": [], "intermediate": [], "useless": []}
    for row in rows:
        if row["step"] > last_step or not row["gold_ids"]:
            continue
        seen: set[str] = set()
        for turn, entry in enumerate(row["turns"]):
            if entry["reward"] is None:
                continue
            pages = {page for search in row["searches"] if search["turn"] == turn for page in search["pages"]}
            new = pages - seen
            seen |= pages
            if row["gold_ids"][-1] in new:
                kind = "answer"
            elif set(row["gold_ids"]) & new:
                kind = "intermediate"
            else:
                kind = "useless"
            gains[kind].append(entry["reward"])
    return {kind: moments(values) for kind, values in gains.items()} | {"steps": f"1-{last_step}"}


def gram_token_share(rows: list[dict], tokenizer_dir: Path) -> list[float]:
    """Share of the policy's tokens that belong to strategic grams, per step."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    marked, written = Counter(), Counter()
    for row in rows:
        for turn in row["turns"]:
            ids = tokenizer.encode(turn["text"], add_special_tokens=False)
            marked[row["step"]] += sum(gram_token_mask([tokenizer.decode([i]) for i in ids]))
            written[row["step"]] += len(ids)
    return [round(marked[step] / written[step], 4) for step in sorted(written)]


def moments(values: list[float]) -> dict:
    n = len(values)
    if n == 0:
        return {"turns": 0}
    mean = sum(values) / n
    variance = sum((v - mean) ** 2 for v in values) / max(n - 1, 1)
    return {"turns": n, "mean": mean, "standard_error": (variance / n) ** 0.5}


if __name__ == "__main__":
    main()
