"""The page of `verl-credit fidelity`: a table of credits for every policy, pictures, and the checks of the measurement."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure

from verl_credit.records.report.curves import STYLE, svg_uri
from verl_credit.records.report.page import template
from verl_credit.records.report.panels import BLUE, GREY, VERMILION
from verl_credit.records.report.text import plain, signed


def fidelity_page(result: Mapping[str, Any]) -> str:
    """Returns a complete HTML document without a script. ``result``: what ``fidelity.json`` has."""
    policies = result["policies"]
    words = {"of_kind": _of_kind, "shown": shown, "signed": signed, "plain": plain}
    pictures = {"agreement_picture": agreement_picture, "difference_picture": difference_picture}
    return template("fidelity.html").render(
        words | pictures,
        settings=result["settings"],
        policies=[(one, _name(one)) for one in policies],
        names=[_name(one) for one in policies],
        overview=_overview(policies) if len(policies) > 1 else [],
    )


def shown(measure: Mapping[str, Any] | None) -> str:
    """A number with its interval."""
    if measure is None:
        return "not measured"
    if measure["value"] is None:
        return "undefined"
    bounds = "" if measure["low"] is None else f" [{plain(measure['low'])}, {plain(measure['high'])}]"
    return plain(measure["value"]) + bounds


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
    ends = (("low", "value"), ("value", "high"))
    bars = [[max(0.0, one[high] - one[low]) for _, one in points] for low, high in ends]
    rows = [row + shift for row, _ in points]
    axes.errorbar(values, rows, xerr=bars, fmt="o", markersize=4, linewidth=1.2, **style)


def _with_intervals(credits: Mapping[Any, Mapping[str, Any]], measure: str) -> list[tuple[Any, Mapping]]:
    """Returns the values that are defined and have an interval."""
    measured = [(name, one[measure]) for name, one in credits.items()]
    return [(name, one) for name, one in measured if None not in (one["value"], one["low"])]
