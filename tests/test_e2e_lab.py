"""The demo's recipe on the tiny lab: build, train, save, report, resume."""

import subprocess
import sys

import pytest

from verl_credit.host.run_files import EVENTS, METRICS, VALIDATION, read_json_lines

pytestmark = pytest.mark.e2e

TIMEOUT_S = 420


def train(lab, run_dir, *overrides):
    command = [sys.executable, "-W", "ignore", "-m", "verl_credit.cli", "train", "--config-name", "lab"]
    settings = ["lab.size=tiny", f"lab.dir={lab}", f"run_dir={run_dir}", "data.val_max_samples=8"]
    done = subprocess.run(
        [*command, *settings, *overrides], cwd=lab.parent, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_two_steps_save_report_and_resume(tmp_path):
    lab, run_dir = tmp_path / "lab", tmp_path / "run"
    first = train(
        lab, run_dir, "trainer.total_training_steps=2", "trainer.save_freq=2", "trainer.test_freq=2"
    )
    assert "lab   0%" in first and "held-out EM after step 2: lab-greedy" in first
    assert "advantage=turn-group-v1d | gain=prob_diff/observation/first_turn=prior" in first
    rows = read_json_lines(run_dir / METRICS)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert isinstance(row["actor/pg_loss"], float) and row["credit/gain/turns"] > 0
        assert row["training/rollout_probs_diff_max"] < 1e-4 and row["credit/sync/weights_changed"] == 1.0
    assert [row["step"] for row in read_json_lines(run_dir / VALIDATION)] == [0, 2]
    assert (run_dir / "report.html").exists() and (run_dir / "curves.png").exists()

    second = train(lab, run_dir, "trainer.total_training_steps=3", "trainer.test_freq=-1")
    assert "using the lab in" in second and "resume: exact, from step 2" in second
    assert [row["step"] for row in read_json_lines(run_dir / METRICS)] == [1, 2, 3]
    # step 2 was evaluated before the resume and is not evaluated again
    assert [row["step"] for row in read_json_lines(run_dir / VALIDATION)] == [0, 2]
    assert [row["kind"] for row in read_json_lines(run_dir / EVENTS)] == ["banner", "resume", "banner"]
