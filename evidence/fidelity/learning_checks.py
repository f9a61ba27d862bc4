"""How far the rank correlation of own cosine with areas holds, and two tests of the areas.

make evidence-raw && python evidence/fidelity/learning_checks.py     # reads learning.json and gigpo_factorial.json
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from scipy import stats
from statsmodels.stats.multitest import multipletests

from verl_credit.study.campaign.statistics import compare

HERE = Path(__file__).resolve().parents[2] / "build/evidence/fidelity"
OPERATORS = ("low_baseline", "half_negative")
BETWEEN = ("gigpo", "joint", "maxrl", "rloo", "leave_one_out", "turn-group-unbiased", "turn-group-v1d")
"""The credits between the two operators on top and the three modes at the bottom."""
DECLARED = (
    ("half_negative", "grpo"),
    ("gigpo", "grpo"),
    ("gigpo_half_negative", "grpo"),
    ("gigpo_half_negative", "half_negative"),
)
RESAMPLES = 10_000

LEARNED = json.loads((HERE / "learning.json").read_text())
NAMES = [name for name in LEARNED["learned"] if name != "grpo"]
PAIRS = np.array(LEARNED["learned"]["rloo"]["pairs"])  # seed, world
APART = {name: 100 * np.array(LEARNED["learned"][name]["each"]) for name in NAMES}
OWN = {name: np.array(LEARNED["measured"][name]["own cosine"]) for name in NAMES}
SEED, WORLD, STEP = np.array([policy.split("-")[1::2] for policy in LEARNED["policies"]], dtype=int).T


def rank(policies: np.ndarray, pairs: np.ndarray, names=NAMES) -> str:
    own, area = ([of[name][at].mean() for name in names] for of, at in ((OWN, policies), (APART, pairs)))
    found = stats.spearmanr(own, area)
    return f"{found.statistic:.2f}, p = {found.pvalue:.4f}"


def student(d: np.ndarray) -> str:
    half = stats.t.ppf(0.975, len(d) - 1) * d.std(ddof=1) / len(d) ** 0.5
    return f"{d.mean():+.3f} ± {half:.3f}, p = {stats.ttest_1samp(d, 0).pvalue:.2g}"


def sign_flips(d: np.ndarray) -> float:
    return compare("a", "b", dict(enumerate(d)), dict.fromkeys(range(len(d)), 0.0)).p


def family(rows: dict[str, np.ndarray]) -> None:
    """Both tests of every difference, before and after Holm over all of ``rows``."""
    tests = {
        "Student": [stats.ttest_1samp(d, 0).pvalue for d in rows.values()],
        "sign flips": [sign_flips(d) for d in rows.values()],
    }
    holm = {test: multipletests(p, method="holm")[1] for test, p in tests.items()}
    for at, (name, d) in enumerate(rows.items()):
        said = "; ".join(f"{test} {p[at]:.5f}, Holm {holm[test][at]:.4f}" for test, p in tests.items())
        print(f"  {name:40s} {student(d)} | {said}")


def by_run(name: str) -> np.ndarray:
    """Own cosine, the mean of each training run."""
    return np.array([OWN[name][(s == SEED) & (w == WORLD)].mean() for s in (1, 2) for w in (0, 1, 2)])


def resampled(credits_too: bool, names=NAMES) -> str:
    """The 95 % interval of the rank correlation when pairs and the runs of the policies are drawn anew, and credits too."""
    random = np.random.default_rng(0)
    own, area = (np.array([of(name) for name in names]) for of in (by_run, APART.get))
    drawn = []
    for _ in range(RESAMPLES):
        of_runs, of_pairs = own[:, random.integers(6, size=6)], area[:, random.integers(15, size=15)]
        chosen = random.integers(len(names), size=len(names)) if credits_too else slice(None)
        drawn.append(stats.spearmanr(of_runs.mean(1)[chosen], of_pairs.mean(1)[chosen]).statistic)
    return "{:.2f} to {:.2f}".format(*np.nanpercentile(drawn, [2.5, 97.5]))


def correlations() -> None:
    every, late = np.ones(len(SEED), bool), PAIRS[:, 0] > 2
    all_pairs = np.ones(len(PAIRS), bool)
    others = [name for name in NAMES if name not in OPERATORS]
    print("Own cosine against areas, Spearman")
    print("  all policies, all seeds:", rank(every, all_pairs))
    print(
        "  all policies, seeds 3 to 5:",
        rank(every, late),
        "| without the operators:",
        rank(every, late, others),
    )
    for world in range(3):
        print(
            f"  policies of world {world}, areas of the others:", rank(world == WORLD, PAIRS[:, 1] != world)
        )
    print("  the seven credits between:", rank(every, all_pairs, BETWEEN))
    print("  without the search's policies (seed 1, world 0):", rank((SEED != 1) | (WORLD != 0), all_pairs))
    print("  the warm starts, their mean:", rank(STEP == 0, all_pairs))
    for world in range(3):
        print(f"    of world {world} alone:", rank((STEP == 0) & (world == WORLD), all_pairs))
    print("  pairs and runs drawn anew:", resampled(False))
    print("  credits too:", resampled(True), "| without the operators:", resampled(True, others))


def factorial() -> None:
    runs = {
        name: {(seed, world): row for seed, world, *row in of}
        for name, of in json.loads((HERE / "gigpo_factorial.json").read_text())["runs"].items()
    }
    keys = sorted(runs["grpo"])

    def apart(a: str, b: str, column: int = 0) -> np.ndarray:
        return 100 * np.array([runs[a][key][column] - runs[b][key][column] for key in keys])

    print("gigpo_factorial, area, the four declared comparisons")
    family({f"{a} - {b}": apart(a, b) for a, b in DECLARED})
    both = apart("gigpo_half_negative", "gigpo") - apart("half_negative", "grpo")
    print("  interaction, not declared:", student(both))
    seeds = sorted({seed for seed, _ in keys})
    for name in ("half_negative", "gigpo"):
        new = [apart(name, "grpo")[[key[0] == seed for key in keys]].mean() for seed in seeds]
        old = [APART[name][PAIRS[:, 0] == seed].mean() for seed in range(1, 6)]
        print(
            f"  {name}, a seed as the unit: ten {student(np.array(old + new))}; new {student(np.array(new))}"
        )
    print("Held-out questions, seeds 1 to 10, 30 pairs, six comparisons")
    held = {}
    for column, mode in ((1, "greedy"), (2, "sampled")):
        first = LEARNED["held_out"][mode]
        for a, b in (("half_negative", "grpo"), ("gigpo", "grpo"), ("half_negative", "gigpo")):
            old = 100 * (np.array(first[a]["each"]) - np.array(first[b]["each"]))
            held[f"{mode}: {a} - {b}"] = np.concatenate([old, apart(a, b, column)])
    family(held)


def main() -> None:
    correlations()
    print("Own cosine minus GRPO's, a training run as the unit (6)")
    for name in NAMES:
        print(
            f"  {name:20s} {student(by_run(name))} | policies of seed 2 alone: {OWN[name][SEED == 2].mean():+.3f}"
        )
    print("Areas minus GRPO's, points, 15 pairs, twelve comparisons")
    family(APART)
    print("Areas minus GRPO's, points, a world as the unit (3)")
    for name in NAMES:
        print(
            f"  {name:20s}",
            student(np.array([APART[name][PAIRS[:, 1] == world].mean() for world in range(3)])),
        )
    factorial()


if __name__ == "__main__":
    main()
