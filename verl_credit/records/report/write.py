"""Writes report.html of a run."""

from pathlib import Path

from verl_credit.records.report.page import page
from verl_credit.records.report.panels import panels, step_panels
from verl_credit.records.report.run_data import read_run
from verl_credit.records.run.files import write_text

REPORT = "report.html"


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` (self-contained) into ``run_dir``; returns the page, which says what is missing. Raises
    FileNotFoundError when metrics.jsonl is missing and ValueError when it holds no step."""
    run = read_run(Path(run_dir))
    return write_text(run.folder / REPORT, page(run, [*panels(run), *step_panels(run)]))
