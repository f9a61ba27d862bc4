"""A shown trajectory comes with its siblings, because its advantages mean nothing without them."""

import pytest

pytest.importorskip("matplotlib")

from kit.report_page import Page, report, sibling, trajectory, turn, write_trajectories
from verl_credit.records.report.page import choose
from verl_credit.records.report.text import MINUS

RELATIVE = "Credit is relative to the group"
TIED = "This group tied: all"
# The first is the one shown: solved, its search found the answer, and yet it becomes less likely.
MIXED = [
    sibling(1.0, (0.25, -1.5, -0.75), (None, None, 0.5)),
    sibling(0.0, (0.5, 0.5, 0.125), (None, None, -0.5)),
    sibling(1.0, (0.5, 0.5, 0.625), (0.0, 0.0, 0.5), (None, None, 0.5)),
]


def page_of(run_dir, **changes):
    write_trajectories(run_dir, [trajectory(**changes)])
    return Page(report(run_dir))


def test_all_siblings_are_in_one_table_with_gain_z_and_advantage(run_dir):
    page = page_of(run_dir, group=MIXED, place=0)
    assert "The group: 3 rollouts of this question, 2 solved" in page.text
    rows = page.rows[page.rows.index(["Outcome", "Turns", "Turn 1", "Turn 2", "Answer"]) + 1 :][:3]
    absent = "\N{EN DASH}"
    assert rows == [
        ["solved 1.00shown below", "2", f"gain +0.250, z {MINUS}1.500{MINUS}0.750", absent, "+0.500"],
        ["failed 0.00", "2", "gain +0.500, z +0.500+0.125", absent, f"{MINUS}0.500"],
        ["solved 1.00", "3", "gain +0.500, z +0.500+0.625", "gain 0.000, z 0.000+0.500", "+0.500"],
    ]
    assert page.text.count(RELATIVE) == 1 and TIED not in page.text


def test_a_group_with_several_outcomes_is_shown_before_a_tied_one():
    tied = trajectory(step=9, n_turns=5, group=[sibling(1.0, (None, None, 0.0))] * 2)
    several = trajectory(step=8, question="Who?", group=MIXED)
    assert choose([tied, several], count=1) == [several]
    stands_out = several | {"step": 7, "turns": [turn() | {"z": -0.75}, turn("x", "", None)]}
    assert choose([several, stands_out], count=1) == [stands_out]
