"""A shown trajectory comes with its siblings, because its advantages mean nothing without them."""

import pytest

pytest.importorskip("matplotlib")

from kit.report_page import Page, report, sibling, trajectory, turn, write_trajectories
from verl_credit.records.report.page import choose
from verl_credit.records.report.text import MINUS, colour

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


@pytest.mark.parametrize(
    "outcome, turns, said",
    [
        (1.0, [(0.5, 1.0, 0.5), (None, None, 0.0)], "all 2 rollouts solved, so the outcomes cancel and only the turn"),
        (0.0, [(0.5, 1.0, 0.0), (None, None, 0.0)], "all 2 rollouts failed, so the update learns nothing from them."),
    ],
)  # fmt: skip
def test_a_group_that_tied_is_said(run_dir, outcome, turns, said):
    text = page_of(run_dir, group=[sibling(outcome, *turns)] * 2, place=1).text
    assert f"This group tied: {said}" in text and RELATIVE in text


def test_a_mode_without_z_says_what_is_compared(run_dir):
    group = [sibling(1.0, (0.5, None, 0.5), (None, None, 0.5)), sibling(0.0, (None, None, -0.5))]
    page = page_of(run_dir, group=group, place=0)
    assert f"{RELATIVE}: every rollout is compared with its siblings." in page.text
    assert "gain +0.500+0.500" in [cell for row in page.rows for cell in row]


def test_values_compare_no_siblings(run_dir):
    (run_dir / "config.yaml").write_text("algorithm: {info_gain_norm_mode: turn_gae}\n")
    text = page_of(run_dir, group=[sibling(1.0, (0.5, 1.0, 0.5), (None, None, 0.0))] * 2, place=1).text
    assert "Credit follows values of states" in text and RELATIVE not in text and TIED not in text


def test_a_group_with_several_outcomes_is_shown_before_a_tied_one():
    tied = trajectory(step=9, n_turns=5, group=[sibling(1.0, (None, None, 0.0))] * 2)
    several = trajectory(step=8, question="Who?", group=MIXED)
    assert choose([tied, several], count=1) == [several]
    stands_out = several | {"step": 7, "turns": [turn() | {"z": -0.75}, turn("x", "", None)]}
    assert choose([several, stands_out], count=1) == [stands_out]


def test_one_colour_scale_holds_for_the_group_too(run_dir):
    group = [
        sibling(1.0, (0.5, 1.0, 3.0), (None, None, 0.5)),
        sibling(0.0, (0.5, 0.5, 0.5), (None, None, -0.5)),
    ]
    page_of(run_dir, group=group, place=1)
    shown = report(run_dir)
    assert f"Advantage{MINUS}1.000\n+1.000" in Page(shown).text  # the ends: twice .5, which both turns have
    assert f'background:{colour(1.0, 1.0)}">+3.000' in shown


def test_another_signal_than_information_gain_is_called_a_turn_reward(run_dir):
    file = run_dir / "metrics.jsonl"
    file.write_text(file.read_text().replace("credit/gain/", "credit/turn_reward/"))
    shown = Page(report(run_dir)).text
    assert "Turn reward, mean" in shown and "what algorithm.turn_signal gave the turn" in shown
    assert "Information gain" not in shown and "gold answer likelier" not in shown
