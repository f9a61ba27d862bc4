"""The probe's picture: the change of entropy beside its prediction."""

from __future__ import annotations

from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from verl_credit.records.report.curves import STYLE, saved
from verl_credit.records.report.panels import BLUE, GREY, INK, VERMILION


def picture(result: dict[str, Any]) -> bytes:
    """Returns a PNG: ΔH over the learning rate, and δH₁ with its 95 % band."""
    with rc_context(STYLE):
        figure = Figure(figsize=(6.6, 4.2), layout="constrained")
        _change(figure.subplots(), result)
        return saved(figure, "png", dpi=110, metadata={"Software": None})


def _change(axes, result: dict[str, Any]) -> None:
    rows = sorted(result["truth"], key=lambda row: row["eta"])
    etas = [row["eta"] for row in rows]
    low, high = ([row["predicted"] + sign * 1.96 * row["predicted_se"] for row in rows] for sign in (-1, 1))
    axes.fill_between(etas, low, high, color=BLUE, alpha=0.18, linewidth=0)
    axes.plot(
        etas, [row["predicted"] for row in rows], color=BLUE, label="δH₁, first order, with 95 % interval"
    )
    axes.errorbar(
        etas,
        [row["change"] for row in rows],
        yerr=[1.96 * row["se"] for row in rows],
        color=VERMILION,
        fmt="o",
        markersize=5,
        capsize=3,
        label="ΔH, measured by importance sampling",
    )
    axes.axhline(0, color=GREY, linewidth=0.9)
    axes.axvline(result["lr"], color=GREY, linewidth=0.9, linestyle=(0, (4, 2)))
    axes.set_xscale("log")
    axes.set_xticks(etas, [f"{eta:.2g}" for eta in etas])
    axes.minorticks_off()
    axes.set_xlabel("learning rate (dashed: that of training)")
    axes.set_ylabel(f"change of entropy, {result['unit']}")
    slope = result["log_log_slope"]
    slope_text = "" if slope is None else f" (log-log slope {slope:.3f})"
    axes.set_title(
        f"Change of entropy by one update{slope_text}", loc="left", fontsize=12, fontweight="bold", color=INK
    )
    axes.legend(frameon=False, loc="best")
