"""Every start of a run leaves an end event that says how it ended."""

import os
import signal

import pytest

from kit.checkpoints import save_step
from kit.lab_run import launches, run
from kit.recipes import load_config
from verl_credit.cli.train import start as train_module
from verl_credit.cli.train.start import command_line
from verl_credit.errors import ExitCode, IntegrityError, PreflightError
from verl_credit.records.run import events
from verl_credit.records.run.files import EVENTS, METRICS, VALIDATION, append_json, read_json_lines
from verl_credit.records.run.state import TRACKER, save_state

FIVE = "trainer.total_training_steps=5"


@pytest.fixture
def ends_with(monkeypatch):
    return launches(monkeypatch)


def last_end(folder):
    row = read_json_lines(folder / EVENTS)[-1]
    assert row["kind"] == "end"
    return [row[name] for name in ("reason", "exit_code", "planned_steps", "done_steps", "why")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "error, ending",
    [
        (IntegrityError("no gain arrives"), ["stopped by a fault", 5, 5, 2, "no gain arrives"]),
        (PreflightError("Ray does not start"), ["refused", 4, 5, 2, "Ray does not start"]),
        (KeyboardInterrupt(), ["interrupted", 130, 5, 2, "the next run goes on from the last checkpoint"]),
    ],
)
def test_an_error_that_has_an_exit_code_is_recorded(tmp_path, capsys, ends_with, error, ending):
    ends_with(error)
    code, lines = run(capsys, tmp_path, FIVE)
    assert last_end(tmp_path) == ending and code == ending[1]
    assert sum(ending[4] in line for line in lines) == 1  # said once


@pytest.mark.slow
def test_a_failure_of_a_worker_and_one_of_ours_are_recorded(tmp_path, capsys, ends_with):
    ends_with(ends_with.failed("a worker died"))
    assert run(capsys, tmp_path, FIVE)[0] == ExitCode.FAILED
    assert last_end(tmp_path) == ["failed", 1, 5, 2, "a worker died"]
    ends_with(ZeroDivisionError("by zero"))
    with pytest.raises(ZeroDivisionError):
        run(capsys, tmp_path, FIVE)
    assert last_end(tmp_path) == ["failed", 1, 5, 2, "ZeroDivisionError: by zero"]


@pytest.mark.slow
def test_sigterm_ends_as_an_interruption(tmp_path, capsys, ends_with, monkeypatch):
    ends_with()
    monkeypatch.setattr(train_module, "_launch", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    assert run(capsys, tmp_path, FIVE)[0] == ExitCode.INTERRUPTED
    assert last_end(tmp_path)[:2] == ["interrupted", 130]


@pytest.mark.slow
def test_done_and_the_time_limit_are_two_ends(tmp_path, capsys, ends_with):
    ends_with(steps=2, note=(events.MAX_HOURS, "max_hours=1: step 2 is the last"))
    assert run(capsys, tmp_path, FIVE)[0] == 0
    assert last_end(tmp_path) == ["time limit", 0, 5, 2, "max_hours=1: step 2 is the last"]
    ends_with(steps=5)
    code, lines = run(capsys, tmp_path / "whole", FIVE)
    assert code == 0 and last_end(tmp_path / "whole") == ["done", 0, 5, 5, ""]
    assert any(line.endswith("  done, 5 of 5 steps done") for line in lines)
    ends_with(steps=5, note=(events.MAX_HOURS, "the last step is the last"))
    assert run(capsys, tmp_path / "both", FIVE)[0] == 0 and last_end(tmp_path / "both")[0] == "done"


@pytest.mark.slow
def test_a_killed_start_gets_its_end_from_the_next_one(tmp_path, capsys, ends_with):
    events.start(tmp_path, 7)
    append_json(tmp_path / METRICS, {"step": 3})
    ends_with(steps=5)
    run(capsys, tmp_path, FIVE)
    rows = [row for row in read_json_lines(tmp_path / EVENTS) if row["kind"] in ("start", "end")]
    assert [row["kind"] for row in rows] == ["start", "end", "start", "end"]
    assert rows[1]["text"] == "killed, 3 of 7 steps done: found at the next start"
    assert (rows[1]["reason"], rows[1]["exit_code"]) == ("killed", None)
    assert [row.get("reason") for row in rows[2:]] == [None, "done"]


@pytest.mark.slow
def test_the_command_of_a_start_is_recorded_without_passwords(tmp_path, capsys, ends_with):
    ends_with()
    run(capsys, tmp_path, FIVE, "search.url=[http://me:secret@127.0.0.1:1,http://127.0.0.1:2]")
    start = read_json_lines(tmp_path / EVENTS)[0]
    servers = "'search.url=[http://***@127.0.0.1:1,http://127.0.0.1:2]'"
    assert start["command"] == f"verl-credit train --config-name lab run_dir={tmp_path} {FIVE} {servers}"
    assert "secret" not in "".join(path.read_text() for path in tmp_path.iterdir() if path.is_file())
    shown = "verl-credit train --config-name own --config-dir 'my dir' 'a=b c'"
    assert command_line("own", ["a=b c"], "my dir") == shown


@pytest.mark.slow
def test_a_refused_start_renews_the_report_without_a_word(tmp_path, capsys, ends_with, monkeypatch):
    """The old page would say how the start before it ended."""
    ends_with(PreflightError("Ray does not start"))
    seen = []
    write = lambda run_dir: seen.append(last_end(run_dir)[:2])  # noqa: E731
    monkeypatch.setattr("verl_credit.records.report.write.write_report", write)
    _, lines = run(capsys, tmp_path, FIVE)
    assert seen == [["refused", 4]] and not any("report" in line for line in lines)


def test_a_damaged_events_file_is_refused_in_one_line(tmp_path, capsys, ends_with):
    (tmp_path / EVENTS).write_text("{\n{}\n")
    code, lines = run(capsys, tmp_path, FIVE)
    assert code == ExitCode.PREFLIGHT and len(lines) == 1
    assert (tmp_path / EVENTS).read_text() == "{\n{}\n"


@pytest.mark.slow
def test_a_run_that_counts_epochs_knows_its_steps_from_a_checkpoint(tmp_path, capsys, ends_with):
    """Once the checkpoint is at the last of them, the run is finished and says so."""
    epochs = ["trainer.total_training_steps=null", "trainer.total_epochs=2"]
    ends_with(steps=2)
    _, lines = run(capsys, tmp_path, *epochs)
    assert any(line.endswith("  step   2") for line in lines) and not any("/0" in line for line in lines)
    folder = save_step(tmp_path / "checkpoints", 2)
    (folder.parent / TRACKER).write_text("2")
    save_state(folder, load_config("lab", [f"run_dir={tmp_path}", *epochs]), 2, {}, None, 4)
    _, lines = run(capsys, tmp_path, *epochs)
    assert any(line.endswith("  step   2/4") for line in lines)
    folder = save_step(tmp_path / "checkpoints", 4)
    (folder.parent / TRACKER).write_text("4")
    save_state(folder, load_config("lab", [f"run_dir={tmp_path}", *epochs]), 4, {}, None, 4)
    append_json(tmp_path / VALIDATION, {"step": 4})
    code, lines = run(capsys, tmp_path, *epochs)
    assert code == ExitCode.NOTHING_LEFT and "finished before" in lines[0] and "total_epochs=2" in lines[0]
