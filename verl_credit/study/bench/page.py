"""The bench's one page, and its lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from verl_credit.credit.laws.check import Finding
from verl_credit.records.report.curves import panel_data_uri
from verl_credit.records.report.page import template
from verl_credit.study.bench.parts import Agreed, cosine_span
from verl_credit.study.campaign.report import difference_format, interval, panels, value_format
from verl_credit.study.campaign.results import Results
from verl_credit.study.fidelity.agreements import Measure
from verl_credit.study.fidelity.result import shown


@dataclass
class Bench:
    """The results so far; each part is filled once it has been measured."""

    name: str
    compared: list[str]
    findings: list[Finding] = field(default_factory=list)
    exact: list[dict] = field(default_factory=list)
    agreed: list[Agreed] = field(default_factory=list)
    learning: Results | None = None

    @property
    def broken(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.wrong]

    def law_lines(self) -> list[str]:
        held = sum(finding.verdict == "holds" for finding in self.findings)
        lines = [f"{finding.name}: {finding.says} {finding.detail}".strip() for finding in self.broken]
        return [f"{held} laws hold, {len(lines)} broken" + (":" if lines else ""), *lines]

    def exact_lines(self) -> list[str]:
        names = list(dict.fromkeys(row["mode"] for row in self.exact))
        return [f"{name:<28} {_span(*cosine_span(self.exact, name))}" for name in names]

    def agreed_lines(self, agreed: Sequence[Agreed]) -> list[str]:
        lines = []
        for one in agreed:
            lines.append(
                f"{one.policy}, {one.prompts} prompts, reliability of A* {shown(one.reliability)}: "
                "correlation with A*; own cosine; own cosine minus GRPO's"
            )
            lines += [
                f"  {row.name:<28} {_shown(row.pearson):<22} {_shown(row.own):<22} {_shown(row.own_difference)}"
                for row in one.rows
            ]
        return lines

    def learning_lines(self) -> list[str]:
        return [] if self.learning is None else [judged.verdict for judged in self.learning.judged]


def page(bench: Bench) -> str:
    learning, more = bench.learning, {}
    if learning is not None:
        more = {
            "panels": [panel for panel in panels(learning) if panel.lines],
            "value": value_format(learning),
            "difference": difference_format(learning),
            "interval": interval,
        }
    return template("bench.html").render(bench=bench, shown=_shown, picture=panel_data_uri, **more)


def _shown(measure: Measure | None) -> str:
    return "undefined" if measure is None else shown(measure)


def _span(low: float | None, high: float | None) -> str:
    return "undefined: its expected gradient is 0" if low is None else f"cosine {low:.3f} to {high:.3f}"
