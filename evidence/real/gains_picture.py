"""The picture of gains.json: every question's gain of each kind of page, with means."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from gain_statistics import PLACES, gains_of
from questions70 import ONE

SHOWN = {
    "distractor, first": ("distractor\nfirst", "#888888"),
    "bridge page, first": ("bridge page\nfirst", "#d55e00"),
    "answer page, first": ("answer page\nfirst", "#0072b2"),
    "distractor after the answer page": ("distractor\nafter\nanswer page", "#888888"),
    "bridge page after the answer page": ("bridge page\nafter\nanswer page", "#d55e00"),
    "answer page after the bridge page": ("answer page\nafter\nbridge page", "#0072b2"),
}
UNITS = {
    "prob_diff": "gain, prob_diff\n(probability per answer token)",
    "log_prob_diff": "gain, log_prob_diff\n(nats per answer token)",
}


def draw(report: dict, path: Path) -> None:
    questions = [question for question in report["scores"] if question["kind"] == ONE]
    figure, axes = plt.subplots(1, 2, figsize=(13, 5.2), layout="constrained")
    random = np.random.default_rng(0)
    for axis, (info_gain_type, unit) in zip(axes, UNITS.items(), strict=True):
        result = report["results"][ONE][info_gain_type]
        gains = [gains_of(question["rows"], info_gain_type) for question in questions]
        axis.axhline(0, color="black", linewidth=0.8)
        for x, (place, (_, colour)) in enumerate(SHOWN.items()):
            values = np.concatenate([of.get(PLACES[place], []) for of in gains])
            axis.scatter(
                x + random.uniform(-0.22, 0.22, len(values)), values, s=14, alpha=0.5, color=colour, lw=0
            )
            mean = result["mean"][place]
            low, high = mean["interval"]
            axis.errorbar(
                x, mean["value"], [[mean["value"] - low], [high - mean["value"]]],
                fmt="D", color="black", markersize=6, capsize=6,
            )  # fmt: skip
            found = result["auc"].get(place)
            says = f"{mean['value']:+.2f}" + (f"\nAUC {found['value']:.2f}" if found else "")
            axis.annotate(
                says, (x, 1.01), xycoords=("data", "axes fraction"), ha="center", va="bottom", fontsize=9
            )
        axis.set_xticks(range(len(SHOWN)), [name for name, _ in SHOWN.values()], fontsize=9)
        axis.set_ylabel(unit)
        axis.axvline(2.5, color="black", linewidth=0.5, linestyle=":")
    figure.suptitle(
        f"Information gain of single pages, {len(questions)} HotpotQA questions with one answer page, SmolLM2-135M-Instruct "
        "in fp32\ndots: pages; diamonds: means over questions with 95 % intervals; above: mean, and AUC against distractors "
        "in the same place",
        fontsize=10,
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)
