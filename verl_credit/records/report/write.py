"""Writes report.html and curves.png of a run, once or again while the run lasts; and a page with the curves of two runs."""

import re
import time
from collections.abc import Callable
from pathlib import Path

from verl_credit.records.report.curves import curves_png
from verl_credit.records.report.page import Settings, page, two_runs
from verl_credit.records.report.panels import panels, step_panels
from verl_credit.records.report.run_data import read_run
from verl_credit.records.run.events import END, START
from verl_credit.records.run.files import EVENTS, METRICS, VALIDATION, read_json_lines, replaced, write_text
from verl_credit.records.run.lock import holder_is_gone
from verl_credit.records.run.table_files import TABLES

REPORT = "report.html"
CURVES = "curves.png"


def write_report(run_dir: Path, refresh_s: int | None = None) -> Path:
    """Write ``report.html`` (self-contained) and ``curves.png`` into ``run_dir``; returns the page, which says what is
    missing. Raises FileNotFoundError when metrics.jsonl is missing and ValueError when it holds no step."""
    run = read_run(Path(run_dir))
    drawn = [*panels(run), *step_panels(run)]
    with replaced(run.folder / CURVES) as file:
        file.write(curves_png(drawn))
    return write_text(run.folder / REPORT, page(run, drawn, refresh_s))


def write_two(a: Path, b: Path, settings: Settings) -> Path:
    """Write ``compared_with_<name of b>.html`` into ``a``; nothing else is written. ``settings``: what differs, by group."""
    runs = read_run(Path(a)), read_run(Path(b))
    name = re.sub(r"[^\w.-]", "_", runs[1].folder.resolve().name, flags=re.ASCII)[:100]
    return write_text(runs[0].folder / f"compared_with_{name}.html", two_runs(*runs, settings))


EVERY_S = 5
_READ = (METRICS, VALIDATION, TABLES, EVENTS)


def watch(
    run_dir: Path, say: Callable[[str], None] = print, pause: Callable[[float], None] = time.sleep
) -> Path | None:
    """Write the report after every change, until the run has ended; the page then stops to reload itself. Returns it, None
    where the run ended before its first step. Ctrl-C writes a page that does not reload, and is raised again."""
    folder = Path(run_dir)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist: a report needs the folder of a run (its run_dir)")
    before, path = None, None
    try:
        while not ended(folder):
            files = [folder / name for name in _READ]
            stats = [file.stat() if file.exists() else None for file in files]
            now = [(one.st_size, one.st_mtime_ns) if one else None for one in stats]
            if now != before and _has_steps(folder):
                path = write_report(folder, refresh_s=EVERY_S)
                say(str(path) if before is None else f"{path}: {_has_steps(folder)} steps")
            elif before is None:
                say(f"{folder}: waiting for the first step")
            before = now
            pause(EVERY_S)
    except KeyboardInterrupt:
        if path is not None:
            write_report(folder)
        raise
    if not _has_steps(folder):
        say(f"{folder}: the run has ended before its first step; there is nothing to report")
        return None
    path = write_report(folder)
    say(f"{path}: the run has ended")
    return path


def ended(folder: Path) -> bool:
    """The last start of the run has an end, or its process is gone. A run without a start waits for one."""
    kinds = [row.get("kind") for row in read_json_lines(folder / EVENTS) if row.get("kind") in (START, END)]
    if not kinds:
        return _has_steps(folder) > 0  # its events.jsonl is gone: nothing says that it goes on
    return kinds[-1] == END or holder_is_gone(folder)


def _has_steps(folder: Path) -> int:
    return len(read_json_lines(folder / METRICS))
