"""The picture of exact_bias.json: the cosine with grad E[r] over group size and over the stop probability."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SHOWN = {
    "rloo": ("rloo, grpo without std", "#000000", "-"),
    "maxrl": ("maxrl", "#888888", "--"),
    "gigpo": ("gigpo", "#56b4e9", "-"),
    "hgpo": ("hgpo", "#56b4e9", "--"),
    "turn-group-unbiased, alpha .3": ("turn-group-unbiased, alpha .3", "#009e73", "-"),
    "turn-group-unbiased, alpha 1": ("turn-group-unbiased, alpha 1", "#009e73", "--"),
    "turn-group-v1d, alpha .3": ("turn-group-v1d, alpha .3", "#d55e00", "-"),
    "turn-group-v1d, alpha 1": ("turn-group-v1d, alpha 1", "#d55e00", "--"),
    "turn-group-v1d, alpha 1, no std": ("turn-group-v1d, alpha 1, no std", "#d55e00", ":"),
    "turn-group": ("turn-group (batch of one group)", "#e69f00", "-"),
    "separate": ("separate", "#cc79a7", "-"),
    "joint": ("joint", "#cc79a7", "--"),
    "mt_grpo": ("mt_grpo", "#0072b2", "-"),
    "turn penalty 0.1": ("control: r - .1 turns", "#888888", ":"),
}
QUESTIONS = ("one hop", "two hops", "one hop and two hops")
STOP, SIZE = 0.3, 8


def draw(rows: list[dict], path: Path) -> None:
    figure, axes = plt.subplots(2, 3, figsize=(14, 8), layout="constrained", sharey="row")
    for column, questions in enumerate(QUESTIONS):
        for row, (over, fixed, value) in enumerate(
            (("group_size", "stop_probability", STOP), ("stop_probability", "group_size", SIZE))
        ):
            axis = axes[row, column]
            for mode, (label, colour, line) in SHOWN.items():
                sizes = [r["group_size"] for r in rows if r["mode"] == mode]
                at = min(value, max(sizes)) if fixed == "group_size" else value
                found = [
                    r for r in rows if r["mode"] == mode and r["questions"] == questions and r[fixed] == at
                ]
                x = [r[over] for r in found]
                axis.plot(
                    x, [r["cosine"] for r in found], line, color=colour, label=label, marker="o", markersize=3
                )
            axis.set_xlabel(
                "rollouts of a group" if row == 0 else "probability of stopping where a search is possible"
            )
            axis.set_title(
                f"{questions}, " + (f"stop probability {STOP}" if row == 0 else f"groups of {SIZE}"),
                fontsize=10,
            )
            axis.grid(alpha=0.3)
        axes[0, 0].set_ylabel("cosine of E[g] with grad E[r]")
        axes[1, 0].set_ylabel("cosine of E[g] with grad E[r]")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=9)
    figure.suptitle(
        "Exact bias: the expected gradient of each mode against the gradient of the expected outcome"
    )
    figure.savefig(path, dpi=90)
    plt.close(figure)
