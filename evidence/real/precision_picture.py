"""The picture of precision.json: gains in bf16 over gains in fp32, and the share of pairs whose order flips."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from precision_statistics import gains

COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00")


def draw(exact: list[dict], report: dict, path: Path) -> None:
    names = list(dict.fromkeys(name.split("; ")[0] for name in report["results"]))
    colour = dict(zip(names, COLOURS, strict=True))
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
    for name in (names[0], report["variant_of_the_engine"], names[-1]):
        tables = [question[name]["branch"] for question in report["scores"]]
        a, b = (np.concatenate(groups) for groups in gains(exact, tables, "log_prob_diff"))
        left.scatter(a, b - a, s=6, alpha=0.5, color=colour[name], label=name, lw=0)
    left.axhline(0, color="black", linewidth=0.8)
    left.set(
        xlabel="gain in fp32, log_prob_diff (nats per answer token)",
        ylabel="error of the gain (nats per answer token)",
    )
    left.set_ylim(-0.4, 0.5)
    left.legend(fontsize=9, markerscale=3, loc="upper right")
    bars = {name: report["results"][f"{name}; branch"] for name in names}
    for place, kind in enumerate(("prob_diff", "log_prob_diff")):
        at = np.arange(len(bars)) + (place - 0.5) * 0.38
        shares = [100 * found[kind]["pairs_flipped"] for found in bars.values()]
        drawn = right.barh(at, shares, 0.36, color=[colour[name] for name in bars], alpha=(1.0, 0.45)[place])
        right.bar_label(drawn, [f"{share:.1f} % {kind}" for share in shares], fontsize=8, padding=3)
    right.set_yticks(range(len(bars)), [name.replace(", ", ",\n", 1) for name in bars], fontsize=9)
    right.invert_yaxis()
    right.margins(x=0.3)
    right.set_xlabel("pairs of rollouts of a question whose order differs from fp32 (% of all pairs)")
    pairs = next(iter(bars.values()))["prob_diff"]
    figure.suptitle(
        f"Information gain in bf16 against fp32: {pairs['gains']} gains of {len(report['scores'])} questions, "
        "SmolLM2-135M-Instruct, scorer branch, CPU",
        fontsize=10,
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)
