"""The page of `verl-credit fidelity`: a table of credits for every policy, pictures, and the checks of the measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure

from verl_credit.records.report.curves import STYLE, svg_uri
from verl_credit.records.report.page import template
from verl_credit.records.report.panels import BLUE, GREEN, GREY, VERMILION
from verl_credit.records.report.text import plain, signed

Turn = Mapping[str, Any]
"""A line of ``turns.jsonl``."""
KINDS = (
    ("brought", "search that brings a needed article", GREEN),
    ("other", "any other search", BLUE),
    ("tool", "turn that searches", BLUE),
    ("ending", "turn that ends", VERMILION),
)


def fidelity_page(result: Mapping[str, Any], turns: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """A complete HTML document without a script. ``result``: what ``fidelity.json`` has; ``turns``: of each of its policies,
    the lines of ``turns.jsonl``."""
    policies = result["policies"]
    return template("fidelity.html").render(
        settings=result["settings"],
        policies=[(one, _name(one), its) for one, its in zip(policies, turns, strict=True)],
        names=[_name(one) for one in policies],
        overview=_overview(policies) if len(policies) > 1 else [],
        of_kind=_of_kind,
        shown=shown,
        signed=signed,
        plain=plain,
        agreement_picture=agreement_picture,
        difference_picture=difference_picture,
        star_picture=star_picture,
    )


def shown(measure: Mapping[str, Any] | None) -> str:
    """A number with its interval."""
    if measure is None or measure["value"] is None:
        return "undefined" if measure is not None else "not measured"
    if measure["low"] is None:
        return plain(measure["value"])
    return f"{plain(measure['value'])} [{plain(measure['low'])}, {plain(measure['high'])}]"


def _name(policy: Mapping[str, Any]) -> str:
    return policy["policy"] if policy["step"] is None else f"Step {policy['step']}"


def _of_kind(policy: Mapping[str, Any], kind: str) -> list[tuple[str, Mapping[str, Any]]]:
    return [(name, credit) for name, credit in policy["credits"].items() if credit["kind"] == kind]


def _overview(policies: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Pearson of every credit, a column for each policy."""
    credits = [policy["credits"] for policy in policies]
    names = dict.fromkeys(chain(*credits))
    return [(name, [shown(of.get(name, {}).get("pearson")) for of in credits]) for name in names]


def agreement_picture(credits: Mapping[str, Mapping[str, Any]]) -> Markup:
    """``credits`` of a policy in ``fidelity.json``, as points with 95 % intervals; undefined values are left out."""
    names = [name for name, credit in credits.items() if "reason" not in credit]
    rows = {row: credits[name] for row, name in enumerate(names)}
    with rc_context(STYLE):
        figure = Figure(figsize=(6.5, 0.9 + 0.3 * len(names)), layout="constrained")
        axes = figure.add_subplot()
        for shift, measure, color in ((-0.12, "pearson", BLUE), (0.12, "same_turn", VERMILION)):
            label = measure.replace("_", " ")
            _points(axes, _with_intervals(rows, measure), color=color, shift=shift, label=label)
        _name_rows(axes, names, "correlation with A*")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, fontsize=8.5)
        return svg_uri(figure)


def difference_picture(gradients: Mapping[str, Mapping[str, Any]]) -> Markup:
    """``gradients``: of one policy in ``fidelity.json``. Own cosines less GRPO's."""
    named = _with_intervals(gradients, "own_difference")
    with rc_context(STYLE):
        figure = Figure(figsize=(6.5, 0.9 + 0.24 * len(named)), layout="constrained")
        axes = figure.add_subplot()
        _points(axes, [(row, one) for row, (_, one) in enumerate(named)], color=BLUE)
        _name_rows(axes, [name for name, _ in named], "own cosine minus GRPO's")
        return svg_uri(figure)


def _name_rows(axes, names: Sequence[str], label: str) -> None:
    axes.axvline(0, color=GREY, linewidth=0.9)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(max(len(names), 1) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(label)


def _points(axes, points: Sequence[tuple[int, Mapping]], *, shift: float = 0, **style) -> None:
    """Values with their 95 % intervals, each in its row."""
    values = [one["value"] for _, one in points]
    bars = [
        [max(0.0, one["value"] - one["low"]) for _, one in points],
        [max(0.0, one["high"] - one["value"]) for _, one in points],
    ]
    rows = [row + shift for row, _ in points]
    axes.errorbar(values, rows, xerr=bars, fmt="o", markersize=4, linewidth=1.2, **style)


def _with_intervals(credits: Mapping[Any, Mapping[str, Any]], measure: str) -> list[tuple[Any, Mapping]]:
    """Returns the values that are defined and have an interval."""
    measured = [(name, one[measure]) for name, one in credits.items()]
    return [(name, one) for name, one in measured if None not in (one["value"], one["low"])]


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
        above = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 2}
        axes.legend(*zip(*handles, strict=True), **above, frameon=False, fontsize=8.5)
        return svg_uri(figure)
