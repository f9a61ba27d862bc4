"""From a run's folder to report.html and curves.png; from two of them to a page that lays their curves over each other."""

from __future__ import annotations

import re
from pathlib import Path

from verl_credit.records.report.curves import curves_png
from verl_credit.records.report.page import page
from verl_credit.records.report.panels import panels
from verl_credit.records.report.run_data import read_run
from verl_credit.records.report.step_panels import step_panels
from verl_credit.records.report.two_runs import Settings, two_runs
from verl_credit.records.run.files import replaced

REPORT = "report.html"
CURVES = "curves.png"


def write_report(run_dir: Path, refresh_s: int | None = None) -> Path:
    """Write ``report.html`` (self-contained) and ``curves.png`` into ``run_dir``; returns the page.

    Both are replaced atomically. Validation, trajectories, tables, events and configuration may be missing: the page
    says so. Raises FileNotFoundError when metrics.jsonl is missing and ValueError when it holds no step.
    """
    run = read_run(Path(run_dir))
    drawn = [*panels(run), *step_panels(run)]
    _write(run.folder / CURVES, curves_png(drawn))
    return _write(run.folder / REPORT, page(run, drawn, refresh_s).encode())


def write_two(a: Path, b: Path, settings: Settings) -> Path:
    """Write ``compared_with_<name of b>.html`` into ``a``; nothing else is written. ``settings``: what differs, by group."""
    runs = read_run(Path(a)), read_run(Path(b))
    name = re.sub(r"[^\w.-]", "_", runs[1].folder.resolve().name, flags=re.ASCII)[:100]
    return _write(runs[0].folder / f"compared_with_{name}.html", two_runs(*runs, settings).encode())


def _write(path: Path, content: bytes) -> Path:
    with replaced(path) as file:
        file.write(content)
    return path
