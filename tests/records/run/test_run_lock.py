"""One run per folder, a finished run, and bad input of `train`: one line, an exit code, nothing heavy started."""

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from kit.lab_run import run
from kit.recipes import load_config
from verl_credit.cli.train import start as train_module
from verl_credit.errors import ExitCode, PreflightError
from verl_credit.records.run.files import METRICS, VALIDATION, append_json
from verl_credit.records.run.lock import LOCK, holder_is_gone, run_lock
from verl_credit.records.run.state import TRACKER, nothing_left, save_state

HOLD = "import sys; from pathlib import Path; from verl_credit.records.run.lock import run_lock\n" \
       "with run_lock(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"  # fmt: skip


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of tmp_path."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_run_in_the_folder_is_refused_with_the_pid_of_the_first(tmp_path, holder):
    said = rf"run_dir={tmp_path}: process {holder.pid} on .* another run_dir"
    with pytest.raises(PreflightError, match=said), run_lock(tmp_path):
        pytest.fail("both hold the folder")
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == holder.pid  # not overwritten


def test_a_killed_run_blocks_nobody(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with run_lock(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    with run_lock(tmp_path):  # and it is given back at the end
        pass


def test_a_folder_whose_process_is_gone_is_free(tmp_path):
    """The greatest number of a process that Linux allows is 2^22."""
    here, none = socket.gethostname(), 2**22 + 5
    holders = {(os.getpid(), here): False, (none, "another"): False, ("x", here): False, (none, here): True}
    for (pid, host), gone in holders.items():
        (tmp_path / LOCK).write_text(json.dumps({"pid": pid, "host": host}))
        assert holder_is_gone(tmp_path) is gone


def test_a_lock_without_a_legible_holder_is_a_lock(tmp_path):
    with (tmp_path / LOCK).open("w") as file:
        file.write("{")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(PreflightError, match="another process is running there"), run_lock(tmp_path):
            pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PreflightError, match="run_dir=.*file/run: Not"), run_lock(tmp_path / "file/run"):
        pass


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch):
    def unsupported(file, how):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    said = []
    with run_lock(tmp_path, said.append):
        pass
    assert "has no locks" in said[0]


# --- train: each of these ends before the lab is built ------------------------------------------------------------


@pytest.fixture
def nothing_heavy(monkeypatch):
    def heavy(*_, **__):
        pytest.fail("something heavy was started")

    monkeypatch.setattr(train_module, "_prepare_world", heavy)
    monkeypatch.setattr(train_module, "_preflight", heavy)
    monkeypatch.setattr(train_module, "_launch", heavy)


@pytest.mark.slow
def test_train_refuses_a_folder_in_use_in_one_line(tmp_path, capsys, holder, nothing_heavy):
    code, lines = run(capsys, tmp_path)
    assert code == ExitCode.PREFLIGHT == 4
    assert len(lines) == 1 and f"process {holder.pid}" in lines[0]


@pytest.mark.slow
def test_train_refuses_checkpoints_that_another_run_writes(tmp_path, capsys, holder, nothing_heavy):
    """Another run_dir, the same trainer.default_local_dir."""
    code, lines = run(capsys, tmp_path / "mine", f"trainer.default_local_dir={tmp_path}")
    assert code == 4 and len(lines) == 1
    assert f"trainer.default_local_dir={tmp_path}: process {holder.pid}" in lines[0]
    assert "another trainer.default_local_dir" in lines[0]


# --- a finished run ------------------------------------------------------------------------------------------------


def finished_run(folder, step=5):
    checkpoints = folder / "checkpoints"
    (checkpoints / f"global_step_{step}").mkdir(parents=True)
    (checkpoints / TRACKER).write_text(str(step))
    append_json(folder / VALIDATION, {"step": step, "val-aux/lab-greedy/em/mean@1": 0.5})
    append_json(folder / METRICS, {"step": step, "credit/outcome/em": 0.5})


@pytest.mark.parametrize(
    "overrides, left",
    [
        (["trainer.total_training_steps=5"], False),
        (["trainer.total_training_steps=4"], False),
        (["trainer.total_training_steps=6"], True),
        (["trainer.total_training_steps=null"], True),  # and the checkpoint does not say how many
        (["trainer.total_training_steps=5", "trainer.resume_mode=disable"], True),
    ],
)
def test_when_there_is_something_left_to_do(tmp_path, overrides, left):
    finished_run(tmp_path)
    assert (nothing_left(load_config("lab", [f"run_dir={tmp_path}", *overrides])) is None) is left


@pytest.mark.slow
def test_a_run_that_counts_epochs_knows_its_end_from_the_checkpoint(tmp_path):
    finished_run(tmp_path)
    epochs = [f"run_dir={tmp_path}", "trainer.total_training_steps=null", "trainer.total_epochs=2"]
    config = load_config("lab", epochs)
    for planned, left in ((6, True), (5, False)):  # 6: ended at max_hours
        save_state(tmp_path / "checkpoints" / "global_step_5", config, 5, {}, None, planned)
        assert (nothing_left(config) is None) is left
    assert "trainer.total_epochs=2; raise" in nothing_left(config)
    for other in ("trainer.total_epochs=3", "data.train_batch_size=8"):
        assert nothing_left(load_config("lab", [*epochs, other])) is None


def test_a_last_step_that_was_never_evaluated_is_left_to_do(tmp_path):
    finished_run(tmp_path)
    (tmp_path / VALIDATION).write_text('{"step": 3}\n')
    five = [f"run_dir={tmp_path}", "trainer.total_training_steps=5"]
    assert nothing_left(load_config("lab", five)) is None
    assert nothing_left(load_config("lab", [*five, "trainer.val_before_train=false"])) is not None


@pytest.mark.slow
def test_a_finished_run_exits_3_and_starts_nothing(tmp_path, capsys, nothing_heavy):
    finished_run(tmp_path)
    code, lines = run(capsys, tmp_path, "trainer.total_training_steps=5")
    assert code == ExitCode.NOTHING_LEFT == 3
    assert "nothing left to learn" in lines[0] and "step 5 of trainer.total_training_steps=5" in lines[0]
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize("damage, said", [("{", "is not JSON"), ("5", "is not a JSON object")])
def test_a_damaged_file_of_the_run_is_told_and_nothing_starts(tmp_path, capsys, nothing_heavy, damage, said):
    (tmp_path / METRICS).write_text(f'{{"step": 1}}\n{damage}\n{{"step": 3}}\n')
    code, lines = run(capsys, tmp_path)
    assert code == ExitCode.PREFLIGHT
    assert f"{METRICS} line 2 {said}" in lines[-1] and "fix the line or take another run_dir" in lines[-1]
    assert (tmp_path / METRICS).read_text().count("\n") == 3


def test_the_codes_are_documented():
    documented = (train_module.Path(__file__).parents[3] / "docs" / "run.md").read_text()
    section = documented.split("## Exit codes", 1)[1].split("\n## ", 1)[0]
    codes = {int(n) for n in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)}
    assert codes == {2, *(code.value for code in ExitCode)}
