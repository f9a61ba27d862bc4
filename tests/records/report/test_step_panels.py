"""What the report draws of the steps' insides: SEPA, values, phases, reasons."""

import pytest

from kit.report_page import training, write_lines
from verl_credit.records.report.panels import panels, step_panels
from verl_credit.records.report.run_data import read_run
from verl_credit.records.report.summary import training_rows


def drawn(folder):
    return {panel.title: panel for panel in step_panels(read_run(folder))}


def lines(panel):
    return {line.label: dict(zip(line.series.steps, line.series.values, strict=True)) for line in panel.lines}


@pytest.fixture
def folder(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [training(step) for step in (1, 2, 3)])
    return tmp_path


def test_sepa_phases_and_reasons(folder):
    row = {
        "credit/sepa_lambda": 0.5, "timing_s/gen": 2.0, "timing_s/update_actor": 1.0, "credit/stop/answer": 0.75,
        "credit/stop/turn_length": 0.25, "credit/stop/bad_call": 0.0,
    }  # fmt: skip
    write_lines(folder / "metrics.jsonl", [training(1) | row])
    found = drawn(folder)
    assert lines(found["SEPA's lambda"]) == {"lambda": {1: 0.5}}
    assert lines(found["Time by phase"]) == {"gen": {1: 2.0}, "update actor": {1: 1.0}}
    assert lines(found["Why rollouts stopped"]) == {"answer": {1: 0.75}, "turn length": {1: 0.25}}


def test_an_environments_success_is_not_called_an_exact_match(tmp_path):
    env = {"credit/env/success": 0.5, "credit/env/return": 2.0, "credit/env/steps": 7.0}
    for given, shown, gone in (env, "Success", "Exact match"), ({}, "Exact match", "Success"):
        write_lines(tmp_path / "metrics.jsonl", [training(step) | given for step in (1, 2)])
        run = read_run(tmp_path)
        titles = {panel.title for panel in panels(run)}
        rows = {row.label for row in training_rows(run)}
        assert shown in titles and gone not in titles
        assert ("Ended with an answer" in rows) == (not given) and (
            {"Return, mean", "Steps, mean"} <= rows
        ) == bool(given)
