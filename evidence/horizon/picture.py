"""Draws what turn credit wins over GRPO by horizon: in the chain world from numbers_chain.json, in the lab from
lab_cosine.jsonl.

python evidence/horizon/picture.py docs/horizon.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from cosine_page import by_horizon, mean_and_half

from verl_credit.records.run.files import read_json_lines

NUMBERS = Path(__file__).parent / "numbers_chain.json"
COSINES_OF_LAB = NUMBERS.with_name("lab_cosine.jsonl")
COSINES = {
    "true values, lam 0.5": ("turn_gae, true values, lam .5", "#0072b2", "-"),
    "values of EV 0.5, lam 0.5": ("turn_gae, values that explain half of V, lam .5", "#0072b2", ":"),
    "gigpo": ("gigpo", "#56b4e9", "--"),
    "half_negative": ("half_negative", "#888888", "--"),
}
AREAS = {
    "true values, lam 0.5": ("turn_gae, true values, lam .5", "#0072b2", "-"),
    "learned, lam 0.5": ("turn_gae, learned values, lam .5", "#009e73", "-"),
    "learned, lam 0.5, halved": ("the same, half the weight below 0", "#d55e00", "-"),
    "gigpo": ("gigpo", "#56b4e9", "--"),
    "half_negative": ("half_negative", "#888888", "--"),
}
LAB = {
    "turn_gae, true values, lam 0.5": ("turn_gae, true values, lam .5", "#0072b2", "-"),
    "turn_gae, learned (features), lam 0.8": ("turn_gae, learned values, lam .8", "#009e73", "-"),
    "turn_gae, learned (features), lam 0.8, halved": ("the same, half the weight below 0", "#d55e00", "-"),
    "gigpo": ("gigpo", "#56b4e9", "--"),
    "none, half_negative": ("half_negative", "#888888", "--"),
}


def draw(numbers: dict, rows: list[dict], path: Path) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    of = {int(name[2:]): some for name, some in by_horizon(rows).items() if name.startswith("H ")}
    lab = {
        name: [mean_and_half([row["own_difference"][name] for row in some]) for some in of.values()]
        for name in LAB
    }
    panels = (
        (numbers["own_cosine"], numbers["hops"], COSINES, "chain world", "own cosine less GRPO's"),
        (
            numbers["area"],
            numbers["learns"],
            AREAS,
            "chain world",
            "area of exact success less GRPO's, points",
        ),
        (lab, [*of], LAB, "lab, a language model", "own cosine less GRPO's"),
    )
    for axis, (found, hops, shown, title, label) in zip(axes, panels, strict=True):
        for number, (name, (legend, colour, line)) in enumerate(shown.items()):
            mean, half = zip(*found[name], strict=True)
            beside = [one + 0.05 * (number - 2) for one in hops]  # so that intervals do not hide each other
            axis.errorbar(beside, mean, half, fmt=line, color=colour, label=legend, marker="o", markersize=3)
        axis.axhline(0, color="black", linewidth=0.8)
        axis.set_xlabel("right searches that an answer needs")
        axis.set_xticks(hops)
        axis.set_title(title, fontsize=10)
        axis.set_ylabel(label)
        axis.legend(fontsize=7)
        axis.grid(alpha=0.3)
    figure.suptitle("What turn credit wins over GRPO, with 95 % intervals", fontsize=11)
    figure.savefig(path, dpi=90)
    plt.close(figure)


if __name__ == "__main__":
    draw(json.loads(NUMBERS.read_text()), read_json_lines(COSINES_OF_LAB), Path(sys.argv[1]))
