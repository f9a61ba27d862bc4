"""Learning curves drawn with matplotlib, a vector picture per panel."""

import base64
import io

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from verl_credit.records.report.panels import GREY, Panel
from verl_credit.records.report.text import percent

# The fixed salt and the absent date make the same run give the same bytes.
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#b8bcc2",
    "axes.labelcolor": "#444444",
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "xtick.color": "#666666",
    "ytick.color": "#666666",
    "svg.fonttype": "path",
    "svg.hashsalt": "verl_credit",
    "text.parse_math": False,
    "figure.facecolor": "white",
}


def panel_data_uri(panel: Panel) -> Markup:
    """The panel as an SVG image inside a ``data:`` address: sharp at any size, and nothing to fetch."""
    with rc_context(STYLE):
        figure = Figure(figsize=(5.3, 3.2), layout="constrained")
        _draw(figure.add_subplot(), panel)
        return svg_uri(figure)


def svg_uri(figure: Figure) -> Markup:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return Markup("data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode("ascii"))


def _draw(axes, panel: Panel) -> None:
    for line in panel.lines:
        steps = line.series.steps
        sparse = len(steps) == 1 or len(steps) < steps[-1] - steps[0] + 1
        axes.plot(
            steps,
            line.series.values,
            label=line.label,
            color=line.color,
            linestyle=line.dash,
            linewidth=line.width,
            # A line over steps without a value is only a guide: dots show where the values are.
            marker="o" if sparse else None,
            markersize=2.5 * line.width,
            clip_on=panel.top is None,  # a line along the edge keeps its width
        )
        if line.band:
            low, high = line.band
            axes.fill_between(low.steps, low.values, high.values, color=line.color, alpha=0.15, linewidth=0)
    axes.set_xlabel("training step")
    axes.set_ylabel(panel.unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color="#ebedf0", linewidth=0.8)
    axes.tick_params(length=0)
    if panel.format is percent:
        axes.set_ylim(bottom=0, top=panel.top)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}"))
    if panel.zero:
        axes.axhline(0, color=GREY, linewidth=0.9, zorder=1)
    if len(panel.lines) == 1:
        return
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        borderaxespad=0.2,
        borderpad=0.2,
        ncols=min(len(panel.lines), 3),
        frameon=False,
        fontsize=8.5,
        labelcolor="#333333",
        handlelength=1.8,
        columnspacing=1.4,
    )
