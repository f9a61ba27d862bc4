"""Pictures of a fidelity measurement's credits: how well each agrees with A*, and its gradient with grad E[r]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure

from verl_credit.records.report.curves import STYLE, svg_uri
from verl_credit.records.report.panels import BLUE, GREY, VERMILION

MEASURES = (("pearson", "pearson", BLUE), ("same_turn", "same turn", VERMILION))


def agreement_picture(credits: Mapping[str, Mapping[str, Any]]) -> Markup:
    """``credits`` of a policy in ``fidelity.json``, as points with 95 % intervals; undefined values are left out."""
    names = [name for name, credit in credits.items() if "reason" not in credit]
    with rc_context(STYLE):
        figure = Figure(figsize=(6.5, 0.9 + 0.3 * len(names)), layout="constrained")
        axes = figure.add_subplot()
        for place, (measure, label, color) in enumerate(MEASURES):
            points = [(row, credits[name][measure]) for row, name in enumerate(names)]
            points = [
                (row, one) for row, one in points if one["value"] is not None and one["low"] is not None
            ]
            axes.errorbar(
                [one["value"] for _, one in points],
                [row + 0.24 * place - 0.12 for row, _ in points],
                xerr=_bars(points),
                color=color,
                fmt="o",
                markersize=4,
                linewidth=1.2,
                label=label,
            )
        axes.axvline(0, color=GREY, linewidth=0.9)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("correlation with A*")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, fontsize=8.5)
        return svg_uri(figure)


def difference_picture(gradients: Mapping[str, Mapping[str, Any]]) -> Markup:
    """``gradients``: of one policy in ``fidelity.json``. Own cosines less GRPO's."""
    points = _with_intervals(gradients, "own_difference")
    with rc_context(STYLE):
        figure = Figure(figsize=(6.5, 0.9 + 0.24 * len(points)), layout="constrained")
        axes = figure.add_subplot()
        values = [one["value"] for _, one in points]
        axes.errorbar(
            values, range(len(points)), xerr=_bars(points), color=BLUE, fmt="o", markersize=4, linewidth=1.2
        )
        axes.axvline(0, color=GREY, linewidth=0.9)
        axes.set_yticks(range(len(points)), [name for name, _ in points])
        axes.set_ylim(max(len(points), 1) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("own cosine minus GRPO's")
        return svg_uri(figure)


def bias_picture(gradients: Mapping[str, Mapping[str, Any]]) -> Markup:
    """Cosine of E[g] with grad E[r] against signal to noise, a number for each credit; numbers are named at the side."""
    points = [
        (name, one["signal_to_noise"]["value"], one["bias"]["value"])
        for name, one in gradients.items()
        if None not in (one["signal_to_noise"]["value"], one["bias"]["value"])
    ]
    with rc_context(STYLE):
        figure = Figure(figsize=(7.5, 4.2), layout="constrained")
        axes = figure.add_subplot()
        for number, (name, across, up) in enumerate(points, start=1):
            axes.plot(across, up, "o", color=BLUE, markersize=4, label=f"{number}  {name}")
            axes.annotate(str(number), (across, up), xytext=(4, 3), textcoords="offset points", fontsize=7.5)
        axes.axhline(1, color=GREY, linewidth=0.9)
        axes.set_xlabel("signal to noise of a batch")
        axes.set_ylabel("cosine of E[g] with grad E[r]")
        if points:
            axes.legend(
                loc="center left",
                bbox_to_anchor=(1, 0.5),
                frameon=False,
                fontsize=7,
                handlelength=0,
                markerscale=0,
            )
        return svg_uri(figure)


def _with_intervals(credits: Mapping[str, Mapping[str, Any]], measure: str) -> list[tuple[str, Mapping]]:
    """Returns the values that are defined and have an interval."""
    return [
        (name, one[measure])
        for name, one in credits.items()
        if None not in (one[measure]["value"], one[measure]["low"])
    ]


def _bars(points: Sequence[tuple[Any, Mapping[str, float]]]) -> list[list[float]]:
    return [
        [max(0.0, one["value"] - one["low"]) for _, one in points],
        [max(0.0, one["high"] - one["value"]) for _, one in points],
    ]
