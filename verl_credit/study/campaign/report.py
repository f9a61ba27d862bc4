"""The report of a campaign: campaign.html, one offline page, and two pictures; also while runs are missing."""

from __future__ import annotations

import base64
import time
from collections import Counter
from pathlib import Path
from urllib.parse import quote

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, PackageLoader, StrictUndefined

from verl_credit.records.report.curves import curves_png, panel_data_uri
from verl_credit.records.report.text import clean, duration
from verl_credit.records.report.write import REPORT
from verl_credit.records.run.files import write_text
from verl_credit.study.campaign.pictures import difference_format, differences_picture, panels, value_format
from verl_credit.study.campaign.results import Results, results
from verl_credit.study.campaign.state import RunState, State
from verl_credit.study.campaign.statistics import Mean

PAGE, CURVES, DIFFERENCES = "campaign.html", "campaign-curves.png", "campaign-differences.png"


def write_campaign_report(folder: Path) -> Path:
    """Write campaign.html, campaign-curves.png and campaign-differences.png into the campaign's folder; returns the page.

    Each is replaced atomically. Errors: FileNotFoundError where no campaign was started, ConfigError for a damaged record.
    """
    outcome = results(Path(folder))
    for name, content in (
        (CURVES, curves_png(panels(outcome))),
        (DIFFERENCES, differences_picture(outcome, "png")),
    ):
        partial = outcome.folder / f"{name}.partial"
        partial.write_bytes(content)
        partial.replace(outcome.folder / name)
    write_text(outcome.folder / PAGE, page(outcome))
    return outcome.folder / PAGE


def page(outcome: Results) -> str:
    here = Path(__file__).parent
    environment = Environment(
        loader=ChoiceLoader([FileSystemLoader(here), PackageLoader("verl_credit.records.report", "")]),
        autoescape=True,
        finalize=clean,
        undefined=StrictUndefined,
    )
    picture = base64.b64encode(differences_picture(outcome, "svg")).decode("ascii")
    return environment.get_template("campaign.html").render(
        found=outcome,
        campaign=outcome.campaign,
        panels=panels(outcome),
        picture=panel_data_uri,
        differences=f"data:image/svg+xml;base64,{picture}",
        interval=interval,
        show=value_format(outcome),
        show_difference=difference_format(outcome),
        link=lambda one: link(one, outcome.folder),
        state=standing(outcome),
        notes=notes(outcome),
        hours=lambda hours: duration(3600 * hours),
        family=len(outcome.campaign.pairs()),
    )


def standing(outcome: Results) -> str:
    """``3 of 18 runs are done``, and the states of the other runs."""
    counts = Counter(one.state for one in outcome.states)
    others = ", ".join(
        f"{counts[state]} {state}" for state in State if counts[state] and state is not State.DONE
    )
    done = f"{outcome.done} of {len(outcome.states)} runs are done" + (others and f"; {others}")
    budget = outcome.campaign.budget.hours
    return f"{done}. {duration(3600 * outcome.hours)} of runs" + (f" of {budget:g} h." if budget else ".")


def notes(outcome: Results) -> list[str]:
    """Sentences that a reader has to know before any number."""
    few = outcome.campaign.cannot_resolve()
    lines = [f"{few}. More can be added (docs/campaigns.md)."] if few else []
    for row in outcome.added:
        when = time.strftime("%Y-%m-%d", time.gmtime(float(row.get("time", 0))))
        lines.append(
            f"Added on {when}, when {row.get('ended', '?')} runs had ended: {row.get('what', '?')}. If results were seen "
            "before, p-values are too small: doubling the seeds after a look makes 5 % false findings about 8 %."
        )
    bad = [one for one in outcome.states if one.state in (State.FAILED, State.DAMAGED)]
    if bad:
        names = ", ".join(one.run.folder for one in bad)
        lines.append(
            f"Failed or damaged: {names}. Their pairs are left out, which favours a condition whose bad runs fail."
        )
    if not outcome.campaign.metric.held_out:
        lines.append(f"{outcome.campaign.metric.name} is measured in training, not on held-out questions.")
    return lines


def interval(mean: Mean, show) -> str:
    return mean.why if mean.low is None else f"{show(mean.low)} to {show(mean.high)}"


def link(one: RunState, folder: Path) -> str | None:
    """The address of the run's own report, from the campaign's page on; None where there is none."""
    path = one.folder / REPORT
    return quote(path.relative_to(folder).as_posix()) if path.exists() else None
