"""Does fidelity predict learning? Credits' gradients on stored policies against the areas under their learning curves.

    verl-credit campaign run credit_learning_twin --parallel 2 --dir RUNS
    verl-credit fidelity RUNS/grpo/seed-S-world-W --steps 0,5,10,20 --gradient --prompts 96 --continuations 32 --dir MEASURED
    python evidence/fidelity/learning.py RUNS MEASURED [MEASURED ...] [--folder FOLDER]

Of every credit: the area under the curve minus GRPO's, mean over the pairs of seed and world that both have, with Student's
interval; own cosine minus GRPO's and the correlation with A*, each a mean over the measured policies. Then Spearman's rank
correlation over credits. GRPO is left out, since both of its differences are 0. The interval resamples the pairs of seed and
world: it holds the noise of learning, not that of own cosine. Writes learning.json and learning.png into FOLDER.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from statistics import fmean

import matplotlib
import numpy as np
from scipy import stats

from verl_credit.records.run.files import VALIDATION, read_json_lines
from verl_credit.study.campaign.record import read_record
from verl_credit.study.campaign.state import states

matplotlib.use("Agg")
import matplotlib.pyplot as plt

GRPO = "grpo"
NAMES = {
    "grpo": "none, grpo",
    "rloo": "none, rloo",
    "low_baseline": "none, low_baseline",
    "half_negative": "none, half_negative",
    "maxrl": "none, maxrl",
    "turn-group-v1d": "turn-group-v1d, alpha 0.3",
    "turn-group-unbiased": "turn-group-unbiased, alpha 1.0",
    "leave_one_out": "leave_one_out, alpha 0.3",
}
"""Conditions whose credit has another name in fidelity.json."""
RESAMPLES = 10_000

Areas = dict[str, dict[tuple[int, int], float]]
"""Condition -> (seed, world) -> area."""


def areas_of(runs: Path) -> Areas:
    found: Areas = {}
    for state in states(read_record(runs).campaign, runs):
        if state.value is not None:
            found.setdefault(state.run.condition, {})[state.run.seed, state.run.world] = state.value
    return found


def held_out_of(runs: Path) -> dict[str, Areas]:
    """Sampling mode -> the same with exact match on held-out questions after the last step."""
    found: dict[str, Areas] = {mode: {} for mode in ("greedy", "sampled")}
    for state in states(read_record(runs).campaign, runs):
        rows = read_json_lines(runs / state.run.folder / VALIDATION)
        for mode, of in found.items():
            if state.value is not None:
                value = rows[-1][f"val-aux/lab-{mode}/em/mean@1"]
                of.setdefault(state.run.condition, {})[state.run.seed, state.run.world] = value
    return found


def policies_of(folders: list[Path]) -> dict[str, dict]:
    """By run and step. A warm start does not name its run: the others of its folder do."""
    found = {}
    for folder in folders:
        measured = json.loads((folder / "fidelity.json").read_text())["policies"]
        (run,) = set(re.findall(r"seed-\d+-world-\d+", " ".join(policy["policy"] for policy in measured)))
        found |= {f"{run}-step-{policy['step']}": policy for policy in measured}
    return found


def fidelity_of(policies: list[dict]) -> dict[str, dict[str, list[float]]]:
    """Condition -> measure -> a number per policy."""
    found = {}
    for condition in (*NAMES, "joint", "separate", "turn-group", "gigpo", "mt_grpo"):
        name = NAMES.get(condition, condition)
        found[condition] = {
            "own cosine": [p["gradients"][name]["own_difference"]["value"] for p in policies],
            "pearson": [p["credits"][name]["pearson"]["value"] for p in policies],
        }
    return found


def differences(areas: Areas) -> dict[str, dict]:
    """Area minus GRPO's over the pairs that both have."""
    found = {}
    for condition, of in areas.items():
        pairs = sorted(of.keys() & areas[GRPO].keys())
        d = np.array([of[pair] - areas[GRPO][pair] for pair in pairs])
        row = {"pairs": pairs, "each": d.tolist(), "mean": float(d.mean())}
        if condition != GRPO and len(d) > 1:
            half = float(stats.t.ppf(0.975, len(d) - 1) * d.std(ddof=1) / len(d) ** 0.5)
            row |= {"half": half, "p": float(stats.ttest_1samp(d, 0.0).pvalue)}
        found[condition] = row
    return found


def rank_correlation(learned: dict[str, dict], score: dict[str, float]) -> dict:
    names = [name for name in learned if name != GRPO and name in score]
    x = np.array([score[name] for name in names])
    y = np.array([learned[name]["mean"] for name in names])
    found = stats.spearmanr(x, y)
    drawn, random = [], np.random.default_rng(0)
    shared = sorted(set.intersection(*({tuple(p) for p in learned[name]["pairs"]} for name in names)))
    each = np.array(
        [
            [
                dict(zip(map(tuple, learned[name]["pairs"]), learned[name]["each"], strict=True))[p]
                for p in shared
            ]
            for name in names
        ]
    )
    for _ in range(RESAMPLES if len(shared) > 1 else 0):
        chosen = random.integers(len(shared), size=len(shared))
        drawn.append(stats.spearmanr(x, each[:, chosen].mean(1)).statistic)
    low, high = np.nanpercentile(drawn, [2.5, 97.5]) if drawn else (None, None)
    return {
        "credits": len(names), "pairs": len(shared), "spearman": float(found.statistic), "p": float(found.pvalue),
        "low": low, "high": high,
    }  # fmt: skip


def parts(areas: Areas, measured: dict, learned: dict, held_out: dict, worlds: list[int]) -> dict[str, float]:
    """Rank correlations of own cosine with areas for parts of the credits, worlds and policies; and those with what is left
    on held-out questions. ``worlds``: of the measured policies."""
    names = [name for name in learned if name != GRPO]
    own = {name: measured[name]["own cosine"] for name in names}
    area = {name: learned[name]["mean"] for name in names}

    def rank(chosen: list[str], x: dict, y: dict) -> float:
        return float(stats.spearmanr([x[n] for n in chosen], [y[n] for n in chosen]).statistic)

    mean = {name: fmean(values) for name, values in own.items()}
    agreement = {name: fmean(measured[name]["pearson"]) for name in names}
    ours = ("low_baseline", "half_negative")
    found = {
        "without the two operators": rank([n for n in names if n not in ours], mean, area),
        "turn modes": rank([n for n in names if n not in (*ours, "maxrl", "rloo")], mean, area),
    }
    for world in sorted({world for _, world in areas[GRPO]}):
        here = [number for number, of in enumerate(worlds) if of == world]
        x = {n: fmean(own[n][number] for number in here) for n in names}
        y = {n: fmean(v - areas[GRPO][at] for at, v in areas[n].items() if at[1] == world) for n in names}
        found[f"world {world}"] = rank(names, x, y)
    for number in range(len(worlds)):
        found[f"policy {number}"] = rank(names, {n: own[n][number] for n in names}, area)
    for mode, rows in held_out.items():
        end = {n: rows[n]["mean"] for n in names}
        found |= {
            f"own cosine, held out, {mode}": rank(names, mean, end),
            f"correlation with A*, held out, {mode}": rank(names, agreement, end),
            f"area, held out, {mode}": rank(names, area, end),
        }
    return found


def picture(learned: dict[str, dict], scores: dict[str, dict[str, float]], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True, layout="constrained")
    for axis, (name, score) in zip(axes, scores.items(), strict=True):
        shown = sorted((row["mean"], name) for name, row in learned.items() if name in score)
        for place, (_, condition) in enumerate(shown):
            row, left = (
                learned[condition],
                place % 2,
            )  # neighbours in height have their names on different sides
            at = score[condition], row["mean"]
            axis.errorbar(*at, yerr=row.get("half", 0), fmt="o", color="#0072b2", capsize=2)
            side = "right" if left else "left"
            axis.annotate(condition, at, (-4 if left else 4, 3), ha=side, textcoords="offset points", size=7)
        axis.axhline(0, color="#999", linewidth=0.8)
        axis.set_xlabel(f"{name}, mean over policies")
    axes[0].set_ylabel("area under the curve minus GRPO's")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("measured", type=Path, nargs="+")
    parser.add_argument("--folder", type=Path, default=Path("build/learning"), help="of the result")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    policies = policies_of(args.measured)
    worlds = [int(name.split("-")[3]) for name in policies]
    areas, measured = areas_of(args.runs), fidelity_of(list(policies.values()))
    learned = differences(areas)
    scores = {
        "own cosine minus GRPO's": {name: fmean(of["own cosine"]) for name, of in measured.items()},
        "correlation with A*": {name: fmean(of["pearson"]) for name, of in measured.items()},
    }
    correlations = {name: rank_correlation(learned, score) for name, score in scores.items()}
    result = {
        "areas": {
            name: {f"seed {s}, world {w}": v for (s, w), v in of.items()} for name, of in areas.items()
        },
        "learned": learned,
        "measured": measured,
        "correlations": correlations,
        "held_out": {mode: differences(of) for mode, of in held_out_of(args.runs).items()},
    }
    result["policies"] = list(policies)
    result["parts"] = parts(areas, measured, learned, result["held_out"], worlds)
    print(result["parts"])
    (args.folder / "learning.json").write_text(json.dumps(result, indent=1) + "\n")
    picture(learned, scores, args.folder / "learning.png")
    for name, row in sorted(learned.items(), key=lambda item: -item[1]["mean"]):
        own, r = (score.get(name, float("nan")) for score in scores.values())
        print(
            f"{name:22s} n {len(row['each']):2d}  area {fmean(areas[name].values()):.3f}  minus GRPO's {row['mean']:+.3f} "
            f"± {row.get('half', float('nan')):.3f}  p {row.get('p', float('nan')):.4f}  own {own:+.3f}  r {r:.2f}"
        )
    for name, found in correlations.items():
        print(f"{name}: {found}")
    for mode, rows in result["held_out"].items():
        for name, row in sorted(rows.items(), key=lambda item: -item[1]["mean"]):
            print(f"held out, {mode}: {name:22s} {row['mean']:+.3f} ± {row.get('half', float('nan')):.3f}")


if __name__ == "__main__":
    main()
