"""The report's table of a start is made of the run's events."""

import pytest

pytest.importorskip("matplotlib")

from kit.report_page import report, write_lines
from verl_credit.records.report.run_data import read_run
from verl_credit.records.report.summary import start_parts
from verl_credit.records.run.files import EVENTS


def event(kind, time, text="start", **more):
    return {"kind": kind, "time": time, "text": text, **more}


START = [
    event("start", 103.5, began=100.0),
    event("stage", 110.0, "Ray is up"),
    event("banner", 111.0, "a banner"),
    event("stage", 108.0, "the <server> is ready"),  # another process wrote it later
]
REFUSED = [event("start", 200.0, began=199.0), event("stage", 200.5, "the machine is checked")]


def test_a_start_is_shown_by_time_since_the_command(run_dir):
    write_lines(run_dir / EVENTS, START + REFUSED)
    parts = start_parts(read_run(run_dir))
    assert [tuple(part) for part in parts] == [
        ("the first event", 3.5, 3.5), ("the <server> is ready", 8.0, 4.5), ("Ray is up", 10.0, 2.0)
    ]  # fmt: skip
    page = report(run_dir)
    row = '<th scope="row">the &lt;server&gt; is ready</th><td>8.0</td><td>4.5</td>'
    assert "<h2>The start</h2>" in page and row in page


@pytest.mark.parametrize(
    "rows", [[], [event("start", 5.0)], [event("stage", 5.0, "x")], [event("start", None)]]
)
def test_without_parts_there_is_no_table(run_dir, rows):
    write_lines(run_dir / EVENTS, rows)
    assert start_parts(read_run(run_dir)) == [] and "<h2>The start</h2>" not in report(run_dir)


def test_an_earlier_run_counts_from_its_first_event(run_dir):
    write_lines(run_dir / EVENTS, [event("start", 5.0), event("stage", 6.5, "Ray is up")])
    assert [tuple(part) for part in start_parts(read_run(run_dir))] == [
        ("the first event", 0.0, 0.0), ("Ray is up", 1.5, 1.5)
    ]  # fmt: skip
