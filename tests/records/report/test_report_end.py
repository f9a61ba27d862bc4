"""The first line of the report says how the run ended; files with wrong values are said, not raised."""

import re

import pytest

pytest.importorskip("matplotlib")


from kit.report_page import Page, evaluation, report, training, write_lines
from verl_credit.errors import ExitCode
from verl_credit.records.report.panels import panels
from verl_credit.records.report.run_data import read_run
from verl_credit.records.report.text import duration, interval
from verl_credit.records.run import events
from verl_credit.records.run.files import EVENTS, read_json_lines


def first_line(folder):
    return re.search(r'<p class="ending( error)?"[^>]*>([^<]*)</p>', report(folder)).groups()


def ended(folder, code, why="", planned=20, seconds=125.0):
    """A start, with its end so many seconds later."""
    events.start(folder, planned)
    events.end(folder, code, why, planned)
    rows = read_json_lines(folder / EVENTS)
    rows[-1]["time"] = rows[-2]["time"] + seconds
    write_lines(folder / EVENTS, rows)


@pytest.mark.parametrize(
    "code, why, error, said",
    [
        (ExitCode.DONE, "", False, "Done: 3 of 20 training steps, 2 min 5 s since the start."),
        (
            ExitCode.INTEGRITY,
            "no gain arrives",
            True,
            "Stopped by a fault: 3 of 20 training steps, 2 min 5 s",
        ),
        (
            ExitCode.FAILED,
            "a worker died",
            True,
            "Failed: 3 of 20 training steps, 2 min 5 s since the start: a",
        ),
        (ExitCode.PREFLIGHT, "no disk", True, "The last start was refused: 3 of 20"),
        (ExitCode.INTERRUPTED, "the next run goes on", False, "Interrupted: 3 of 20"),
    ],
)
def test_the_first_line_says_how_the_run_ended(run_dir, code, why, error, said):
    ended(run_dir, code, why)
    marked, text = first_line(run_dir)
    assert text.startswith(said) and text.endswith(why) and bool(marked) is error
    assert Page(report(run_dir)).text.index(text) < Page(report(run_dir)).text.index("Training steps 1 to 3")


def test_a_killed_run_is_marked_and_has_no_duration(run_dir):
    events.start(run_dir, 20)
    assert first_line(run_dir) == (None, "This run has no end yet: it goes on, or it was killed.")
    ended(run_dir, ExitCode.DONE)
    kinds = [row.get("reason") for row in read_json_lines(run_dir / EVENTS) if row["kind"] == "end"]
    assert kinds == ["killed", "done"]
    rows = read_json_lines(run_dir / EVENTS)
    write_lines(run_dir / EVENTS, [row for row in rows if row.get("reason") != "done"][:-1])
    assert first_line(run_dir) == (" error", "Killed: 3 of 20 training steps: found at the next start")


def test_a_start_with_nothing_left_hides_no_end(run_dir):
    ended(run_dir, ExitCode.INTEGRITY, "no gain")
    ended(run_dir, ExitCode.NOTHING_LEFT, "nothing left to learn")
    assert first_line(run_dir)[1].startswith("Stopped by a fault")


def test_a_reward_of_ones_own_stands_in_line_table_and_curve(run_dir):
    """Its curve and its text are in place of exact match's, and no interval is claimed, because its bounds are not known."""
    ours = ("credit/outcome/em", "credit/outcome/format_ok")
    rows = [{name: value for name, value in training(step).items() if name not in ours} for step in (1, 2, 3)]
    write_lines(run_dir / "metrics.jsonl", rows)
    held_out = {"val-core/game-greedy/reward/mean@1": 0.25, "val-aux/game-greedy/questions": 8}
    write_lines(
        run_dir / "validation.jsonl",
        [{"step": 0} | held_out, {"step": 3, **held_out} | {next(iter(held_out)): 0.5}],
    )
    with (run_dir / "config.yaml").open("a") as config:
        config.write("reward: {custom_reward_function: {path: my/reward.py}}\n")
    page = Page(report(run_dir))
    assert "Held-out reward (greedy, game): 0.50 at step 3 (8 questions), 0.25 at step 0." in page.text
    assert ["Reward, greedy", "0.25", "0.508 questions", "+0.250"] in page.rows
    assert "Exact match" not in page.text and "interval" not in page.text
    first, *others = panels(read_run(run_dir))
    assert first.title == "Reward" and "By my/reward.py" in first.caption
    assert [line.label for line in first.lines] == ["held-out, greedy", "greedy, if in format", "training"][
        ::2
    ]
    assert "Reward" not in {panel.title for panel in others}


def test_held_out_questions_come_with_an_interval(run_dir):
    assert "95 % interval" not in Page(report(run_dir)).text
    rows = [evaluation(0, 0.375, 0.2), evaluation(3, 0.625, 0.4) | {"val-aux/lab-greedy/questions": 64}]
    write_lines(run_dir / "validation.jsonl", rows)
    page = Page(report(run_dir))
    known = "64 questions, 95 % interval 50.3 % to 73.3 %"
    said = f"Held-out exact match (EM, greedy, lab): 62.5 % at step 3 ({known}), 37.5 % at step 0."
    assert said in page.text
    assert ["Exact match (EM), greedy", "37.5 %", f"62.5 %{known}", "+25.0 points"] in page.rows
    assert interval(0.0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)  # Wilson's table values
    assert interval(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert [duration(s) for s in (5.4, 125, 7260)] == ["5 s", "2 min 5 s", "2 h 1 min"]
