"""What the report draws of the steps' insides: quantiles of credit from the tables, SEPA, phases, reasons."""

import pytest

from kit.report_page import training, write_lines
from verl_credit.records.report import panels as module
from verl_credit.records.report.panels import step_panels
from verl_credit.records.report.run_data import read_run
from verl_credit.records.run.tables import TURNS, table_path, write_table


def write_turns(folder, step, advantages, clips, rewards, valid=None):
    n = len(advantages)
    same = {
        "uid": "a", "group": 0, "turn": 0, "answer": False, "tokens": 1, "has_reward": True, "signals": [],
        "z": None, "anchor": None, "value": None, "outcome": 0.0, "outcome_advantage": 0.0,
    }  # fmt: skip
    columns = {name: [value] * n for name, value in same.items()} | {
        "row": list(range(n)), "advantage": advantages, "clip_scale": clips, "reward": rewards,
        "valid": valid or [True] * n,
    }  # fmt: skip
    write_table(folder, TURNS, step, columns, {})


def drawn(folder):
    return {panel.title: panel for panel in step_panels(read_run(folder))}


def lines(panel):
    return {line.label: dict(zip(line.series.steps, line.series.values, strict=True)) for line in panel.lines}


@pytest.fixture
def folder(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [training(step) for step in (1, 2, 3)])
    return tmp_path


def test_quantiles_of_a_step_by_hand(folder):
    """0 to 4 in step 1: the median is 2, the first quarter 1. Invalid rows and turns without a reward are out."""
    write_turns(folder, 1, [3.0, 0.0, 4.0, 1.0, 2.0, 99.0], [1.0, 1.1, 9.0, 1.2, 9.0, 9.0],
                [0.1, 0.1, None, 0.1, None, 0.1], [True] * 5 + [False])  # fmt: skip
    write_turns(folder, 3, [-1.0], [0.5], [0.0])
    found = drawn(folder)
    assert list(found)[:2] == ["Advantages of turns", "Clip scales of turns"]
    advantages, clips = lines(found["Advantages of turns"]), lines(found["Clip scales of turns"])
    assert list(advantages) == ["5 %", "25 %", "50 %", "75 %", "95 %"]
    assert [advantages[q][1] for q in advantages] == pytest.approx([0.2, 1.0, 2.0, 3.0, 3.8])
    assert advantages["50 %"] == {1: 2.0, 3: -1.0} and clips["50 %"] == pytest.approx({1: 1.1, 3: 0.5})


def test_damaged_tables_are_counted_and_those_of_unfinished_steps_left_out(folder):
    for step in (1, 2, 4):
        write_turns(folder, step, [float(step)], [1.0], [0.1])
    table_path(folder, TURNS, 2).write_bytes(b"half")
    panel = drawn(folder)["Advantages of turns"]
    assert lines(panel)["50 %"] == {1: 1.0} and "1 tables could not be read" in panel.caption


def test_of_a_long_run_some_steps_are_read_the_last_among_them(folder, monkeypatch):
    monkeypatch.setattr(module, "STEPS_READ", 3)
    write_lines(folder / "metrics.jsonl", [training(step) for step in range(1, 9)])
    for step in range(1, 9):
        write_turns(folder, step, [float(step)], [1.0], [0.1])
    assert list(lines(drawn(folder)["Advantages of turns"])["50 %"]) == [2, 5, 8]


def test_a_run_of_an_earlier_version_has_no_such_panels(folder):
    assert drawn(folder) == {}


def test_sepa_phases_and_reasons(folder):
    row = {
        "credit/sepa_lambda": 0.5, "credit/exec_entropy_mean": 1.0, "credit/post_exec_entropy_mean": 1.0,
        "credit/plan_entropy_var": 0.2, "timing_s/gen": 2.0, "timing_s/update_actor": 1.0, "credit/stop/answer": 0.75,
        "credit/stop/turn_length": 0.25, "credit/stop/bad_call": 0.0,
    }  # fmt: skip
    write_lines(folder / "metrics.jsonl", [training(1) | row])
    found = drawn(folder)
    assert lines(found["SEPA's lambda"]) == {"lambda": {1: 0.5}}
    assert lines(found["Mean uncertainty"]) == {"execution, before": {1: 1.0}, "execution, after": {1: 1.0}}
    assert list(lines(found["Variance of uncertainty"])) == ["planning, before"]
    assert lines(found["Time by phase"]) == {"gen": {1: 2.0}, "update actor": {1: 1.0}}
    assert lines(found["Why rollouts stopped"]) == {"answer": {1: 0.75}, "turn length": {1: 0.25}}


def test_a_run_with_values_shows_what_they_explain(tmp_path):
    name = "credit/values/explained_variance"
    steps = [
        training(step) | {name: value, f"{name}_of_changes": change}
        for step, value, change in ((1, 0.1, -0.2), (2, 0.5, 0.1))
    ]
    write_lines(tmp_path / "metrics.jsonl", steps)
    panel = drawn(tmp_path)["Explained variance of values"]
    assert lines(panel) == {"outcomes": {1: 0.1, 2: 0.5}, "changes": {1: -0.2, 2: 0.1}}
