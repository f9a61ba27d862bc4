"""The first line of the report says how the run ended; files with wrong values are said, not raised."""

import re

import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from kit.report_page import Page, evaluation, report, training, write_lines
from verl_credit.errors import ExitCode
from verl_credit.records.report.curves import _draw
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


def test_the_size_of_a_step_is_beside_the_recipes(run_dir):
    events.start(run_dir, 20, size="a step: 64 rollouts; as in the recipe")
    assert "A step: 64 rollouts; as in the recipe." in Page(report(run_dir)).text


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


def test_a_run_of_an_earlier_version_is_told_apart(run_dir):
    assert first_line(run_dir) == (None, "events.jsonl does not say how this run ended.")


def test_versions_are_shown_or_missed(run_dir):
    assert "versions.json is missing: the versions are not known." in Page(report(run_dir)).text
    (run_dir / "versions.json").write_text('{"verl": "0.9.1", "torch": "2.13.0"}')
    assert "verl 0.9.1 · torch 2.13.0" in Page(report(run_dir)).text


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


@pytest.mark.parametrize(
    "damage, said",
    [
        ('["verl"]', "versions.json is damaged ("),
        ("[" * 5000, "versions.json is damaged ("),
        ("{}", "versions.json is empty"),
        (None, "versions.json is damaged ("),
    ],
)
def test_damaged_versions_are_said_and_the_rest_is_shown(run_dir, damage, said):
    path = run_dir / "versions.json"
    path.mkdir() if damage is None else path.write_text(damage, errors="surrogateescape")
    text = Page(report(run_dir)).text
    assert said in text and "the versions are not known." in text and "First and last values" in text


def test_the_command_is_that_of_the_start_whose_end_is_told(run_dir):
    events.start(run_dir, 20)
    assert "verl-credit train" not in Page(report(run_dir)).text
    for seed, code in ((1, ExitCode.FAILED), (2, ExitCode.INTEGRITY), (3, ExitCode.NOTHING_LEFT)):
        events.start(run_dir, 20, f"verl-credit train --config-name lab seed={seed} 'a=<b>'")
        assert f"seed={seed} 'a=<b>'" in Page(report(run_dir)).text  # while it goes on
        events.end(run_dir, code, "", 20)
    text = Page(report(run_dir)).text
    assert "verl-credit train --config-name lab seed=2 'a=<b>'" in text and "seed=3" not in text


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


@pytest.mark.parametrize(
    "damage, said",
    [
        (None, "config.yaml is missing."),
        (lambda text: text + "x: [1", "config.yaml is damaged (while parsing"),
        (lambda text: "[" * 5000, "config.yaml is damaged ("),
    ],
)
def test_a_configuration_that_is_not_whole_is_said(run_dir, damage, said):
    path = run_dir / "config.yaml"
    assert "config.yaml" not in Page(report(run_dir)).text
    path.write_text(damage(path.read_text())) if damage else path.unlink()
    assert said in Page(report(run_dir)).text


def test_the_axis_of_exact_match_goes_from_0_to_100_percent(run_dir):
    drawn = {panel.title: panel for panel in panels(read_run(run_dir))}
    limits = {}
    for title in ("Exact match", "Clipped tokens"):
        axes = Figure().add_subplot()
        _draw(axes, drawn[title])
        limits[title] = axes.get_ylim()
    assert limits["Exact match"] == (0, 1) and limits["Clipped tokens"][1] < 0.1
