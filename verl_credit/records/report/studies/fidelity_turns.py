"""Pictures of a fidelity measurement's turns: A* by number and kind, and V beside the gold answer's probability."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from verl_credit.records.report.curves import STYLE, svg_uri
from verl_credit.records.report.panels import BLUE, GREEN, GREY, VERMILION

Turn = Mapping[str, Any]
"""A line of ``turns.jsonl``."""
KINDS = (
    ("brought", "search that brings a needed article", GREEN),
    ("other", "any other search", BLUE),
    ("tool", "turn that searches", BLUE),
    ("ending", "turn that ends", VERMILION),
)


def kind_of(turn: Turn) -> str:
    """Returns a name of `KINDS`; ``tool`` when the data set does not name the needed articles."""
    if turn["kind"] == "ending" or turn["brought"] is None:
        return turn["kind"]
    return "brought" if turn["brought"] else "other"


def star_picture(turns: Sequence[Turn]) -> Markup:
    """Boxes from quartile to quartile, whiskers from the 5th to the 95th percentile; below a tick the number of turns."""
    stars: dict[str, dict[int, list[float]]] = {}
    for turn in turns:
        stars.setdefault(kind_of(turn), {}).setdefault(turn["turn"] + 1, []).append(turn["a_star"])
    kinds = [kind for kind in KINDS if kind[0] in stars]
    width = 0.8 / len(kinds)
    with rc_context(STYLE):
        figure = Figure(figsize=(5.3, 3.4), layout="constrained")
        axes = figure.add_subplot()
        handles = []
        for place, (kind, label, color) in enumerate(kinds):
            boxes = axes.boxplot(
                list(stars[kind].values()),
                positions=[number + width * (place - (len(kinds) - 1) / 2) for number in stars[kind]],
                widths=0.85 * width,
                whis=(5, 95),
                showfliers=False,
                patch_artist=True,
                boxprops={"facecolor": color, "alpha": 0.35, "edgecolor": color},
                medianprops={"color": color, "linewidth": 2},
            )
            handles.append((boxes["boxes"][0], label))
        axes.axhline(0, color=GREY, linewidth=0.9, zorder=0)
        numbers = range(1, max(turn["turn"] for turn in turns) + 2)
        counts = [sum(turn["turn"] + 1 == number for turn in turns) for number in numbers]
        axes.set_xticks(numbers, [f"{number}\n{n}" for number, n in zip(numbers, counts, strict=True)])
        axes.set_xlabel("number of the turn, and how many there are")
        axes.set_ylabel("A*")
        axes.legend(
            *zip(*handles, strict=True),
            loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, fontsize=8.5,
        )  # fmt: skip
        return svg_uri(figure)


@dataclass(frozen=True)
class GoldAgainstValue:
    """The gold answer's probability and V of distinct contexts.

    ``rmse`` includes the noise of V. ``spearman`` is None when either is constant.
    """

    gold: np.ndarray
    value: np.ndarray

    @property
    def rmse(self) -> float:
        return float(np.sqrt(np.mean((self.gold - self.value) ** 2)))

    @property
    def spearman(self) -> float | None:
        if np.ptp(self.gold) == 0 or np.ptp(self.value) == 0:
            return None
        return float(spearmanr(self.gold, self.value).statistic)


def gold_against_value(turns: Iterable[Turn]) -> GoldAgainstValue | None:
    """Returns None when no turn has the gold answer's probability."""
    points = {
        turn["before"]: (turn["gold_probability"], turn["value"])
        for turn in turns
        if None not in (turn["gold_probability"], turn["value"])
    }
    return GoldAgainstValue(*np.array(list(points.values())).T) if points else None


def gold_picture(points: GoldAgainstValue) -> Markup:
    """A point for each context; on the line the two are equal."""
    with rc_context(STYLE):
        figure = Figure(figsize=(5.3, 3.8), layout="constrained")
        axes = figure.add_subplot()
        axes.plot([0, 1], [0, 1], color=GREY, linewidth=0.9)
        axes.plot(points.gold, points.value, "o", color=BLUE, markersize=4, alpha=0.3, markeredgewidth=0)
        axes.set_xlim(-0.03, 1.03)
        axes.set_ylim(-0.03, 1.03)
        axes.set_xlabel("probability of the gold answer, as gains have it")
        axes.set_ylabel("V: chance to answer rightly")
        return svg_uri(figure)
