"""A* in the lens: beside the credit of the turns that were measured, and never of other rollouts."""

import pytest

from kit.credit_tables import write_step
from kit.report_page import SCALES, report
from verl_credit.records.report.lens import lens, stars_path, text_digest
from verl_credit.records.run.files import append_json
from verl_credit.records.run.rollouts import read_tokens
from verl_credit.records.run.table_files import ROLLOUTS, table_path


@pytest.fixture
def measured(run_dir):
    """A run whose step 3 has A* of row 0's turns."""
    write_step(run_dir)
    columns = read_tokens(table_path(run_dir, ROLLOUTS, 3)).columns
    text = text_digest(columns["pieces"][columns["row"].index(0)])
    for turn, star in enumerate((0.25, -0.125, 0.0)):
        line = {"row": 0, "turn": turn, "text": text, "a_star": star, "se": 0.0625}
        append_json(stars_path(run_dir, 3), line)
    return run_dir


def stars(found):
    return [[turn["star"] for turn in row["turns"]] for group in found.groups for row in group["rollouts"]]


def test_turns_that_were_measured_have_it_beside_their_credit(measured):
    found = lens(measured, 3, SCALES)
    minus = "\N{MINUS SIGN}"
    with_star = [turns for turns in stars(found) if set(turns) != {None}]
    assert with_star == [["+0.250 ± 0.06", f"{minus}0.125 ± 0.06", "0.000 ± 0.06"]]
    assert "under the policy that wrote these rollouts, that of step 2." in found.groups[0]["notes"][-1]
    assert found.problems == [] and "+0.250 ± 0.06" in report(measured).replace("\\u00b1", "±")


def test_a_step_that_was_made_again_has_none_and_the_page_says_so(measured):
    lines = stars_path(measured, 3).read_text()
    stars_path(measured, 3).write_text(lines.replace(lines.split('"text": "')[1][:24], "0" * 24))
    found = lens(measured, 3, SCALES)
    assert {star for turns in stars(found) for star in turns} == {None} and len(found.groups) > 1
    (problem,) = found.problems
    assert problem.startswith(f"{stars_path(measured, 3)} is of other rollouts of step 3: ")


@pytest.mark.browser
def test_the_page_shows_it_beside_the_advantage(measured, browser):
    report(measured)
    browser.problems.clear()
    browser.open(measured / "report.html")
    heads = browser.value("[...document.querySelectorAll('.lens-head')].map(e => e.textContent)")
    assert "A* +0.250 ± 0.06" in heads[0] and not any("A*" in head for head in heads[5:])
    assert browser.problems == []
