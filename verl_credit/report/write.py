"""From a run's folder to report.html and curves.png."""

from __future__ import annotations

from pathlib import Path

from verl_credit.report.curves import curves_png
from verl_credit.report.page import page
from verl_credit.report.panels import panels
from verl_credit.report.run_data import read_run
from verl_credit.report.step_panels import step_panels
from verl_credit.run.files import write_text

REPORT = "report.html"
CURVES = "curves.png"


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` (self-contained, no script) and ``curves.png`` into ``run_dir``; returns the page.

    Both are replaced atomically. Validation, trajectories, events and configuration may be missing: the page
    says so. Raises FileNotFoundError when metrics.jsonl is missing and ValueError when it holds no step.
    """
    run = read_run(Path(run_dir))
    drawn = [*panels(run), *step_panels(run)]
    _replace(run.folder / CURVES, curves_png(drawn))
    write_text(run.folder / REPORT, page(run, drawn))
    return run.folder / REPORT


def _replace(path: Path, content: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    partial.replace(path)
