"""The report's beginning: exact match once, the run's warnings, and one group with GRPO's credit beside its own."""

import re

import pytest

pytest.importorskip("matplotlib")

from kit.credit_tables import GAINS, ROWS, write_step
from kit.report_page import SCALES, Page, report, write_lines
from verl_credit.records.report.lens import lens
from verl_credit.records.report.opening import GIST, gist
from verl_credit.records.report.text import MINUS, signed


def beginning(folder):
    """The text before the first curve."""
    before, curves, _ = Page(report(folder)).text.partition("Learning curves")
    assert curves
    return before


@pytest.mark.parametrize(
    "text, said",
    [
        ('<think> first</think>\n<tool_call>\n{"arguments": {"query": " the  town"}}\n</tool_call>', "the town"),
        ('<tool_call>{"arguments": {"query": ["a town", "b"]}}</tool_call>', "a town"),
        ("<think>so</think><answer> here</answer><|im_end|>", "here"),
        ("<tool_call><function=search><parameter=query>\nthe town\n</parameter></function>", "the town"),
        ("<think>never ends", "never ends"),
        ("", ""),
        ("x" * 99, "x" * (GIST - 1) + "…"),
    ],
)  # fmt: skip
def test_a_turn_in_one_line(text, said):
    assert gist(text) == said


def test_the_report_begins_with_a_group_and_both_credits(run_dir):
    """ "Where?" has outcomes 1, 0, 0: GRPO's 1.155 and -.577 (ddof 1), which all turns of a rollout have. The run's standard
    deviation (ddof 0) makes them 1.414 and -.707, and is not what the page opens with."""
    where = slice(4, 7)
    write_step(run_dir, rows=ROWS[where], gains=GAINS[where], outcomes=[1.0, 0.0, 0.0], groups=[*"qqq"])
    group = lens(run_dir, 3, SCALES).groups[0]
    first = beginning(run_dir)
    assert group["question"] == "Where?" and "One group, two creditsWhere?" in re.sub(r"\n", "", first)
    assert "3 rollouts, 1 right · turn mode turn-group-v1d" in first
    rows = [row for row in Page(report(run_dir)).rows if row and re.match(r"\d(right|wrong)", row[0])]
    assert [row[0] for row in rows] == ["1right", "2wrong", "3wrong"]
    theirs = ("+1.155", f"{MINUS}0.577", f"{MINUS}0.577")
    for row, credits, grpo in zip(rows, group["advantage"], theirs, strict=True):
        cells = [cell for cell in row[1:] if "this run" in cell]
        wanted = [f"this run {signed(credit)} GRPO {grpo}" for credit in credits]
        assert len(cells) == len(wanted) and all(map(str.__contains__, cells, wanted))
    said = "s differs most at rollout 1, turn 1: +1.714 where GRPO gives +1.155 (+1.414 with this run"
    assert said in " ".join(first.split())


def test_warnings_come_before_the_group_and_settings_after_everything(run_dir):
    write_step(run_dir)
    cut = "warning: in step {} {}% of the turns were cut"
    rows = [
        {"time": 1.0, "kind": "banner", "text": "verl_credit: advantage=turn-group-v1d"},
        {"time": 1.5, "kind": "idle", "text": "without effect: gtpo.beta"},
        {"time": 1.6, "kind": "idle", "text": "unused keys: algorithm.x"},
        {"time": 2.0, "kind": "turn_length", "text": cut.format(2, 8)},
        {"time": 3.0, "kind": "turn_length", "text": cut.format(9, 30)},
        {"time": 4.0, "kind": "of_your_own", "text": "warning: <b>"},
    ]
    write_lines(run_dir / "events.jsonl", rows)
    text = report(run_dir)
    shown = re.findall(r'<p class="warning"><b>(.*?)</b>(.*?)</p>', text)
    assert shown == [
        ("Without effect:", " gtpo.beta"),
        ("Warning:", " in step 9 30% of the turns were cut"),
        ("Warning:", " &lt;b&gt;"),
    ]
    assert text.rindex('class="warning"') < text.index("One group, two credits")
    end = text.index("<h2>Settings and versions</h2>")
    for settings in ("verl_credit: advantage=turn-group-v1d", "unused keys: algorithm.x"):
        assert text.index(settings) > end and text.count(settings) == 1
