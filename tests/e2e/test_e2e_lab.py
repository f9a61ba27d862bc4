"""The demo's recipe on the tiny lab: build, train on loopback, save, Ctrl-C, report, resume."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from ipaddress import ip_address

import psutil
import pytest

from verl_credit.run.files import EVENTS, METRICS, VALIDATION, read_json_lines

pytestmark = pytest.mark.e2e

TIMEOUT_S = 420
CREDIT = [
    "algorithm.transform_mode=gtpo_sepa_hicra",
    "algorithm.sepa.delay_steps=0",
    "algorithm.sepa.steps=10",
    "algorithm.sepa.correct_rate_gate=0",
    "algorithm.info_gain_warmup_steps=1",
]


def start(lab, run_dir, *overrides):
    command = [sys.executable, "-W", "ignore", "-m", "verl_credit.cli", "train", "--config-name", "lab"]
    settings = ["lab.size=tiny", f"lab.dir={lab}", f"run_dir={run_dir}", "data.val_max_samples=8", *CREDIT]
    return subprocess.Popen(
        [*command, *settings, *overrides],
        cwd=lab.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # A suite that runs in the background may have been told to ignore Ctrl-C; what it starts must not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def listening(processes):
    """{(process, address)} of every TCP socket that listens."""
    found = set()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            name = " ".join(process.cmdline()) or process.name()
            for socket in process.net_connections("tcp"):
                if socket.status == psutil.CONN_LISTEN:
                    found.add((name.strip(), ip_address(socket.laddr.ip.removeprefix("::ffff:"))))
    return found


def test_build_train_save_interrupt_report_and_resume(tmp_path):
    lab, run_dir = tmp_path / "lab", tmp_path / "run"
    process = start(
        lab, run_dir, "trainer.total_training_steps=50", "trainer.save_freq=2", "trainer.test_freq=2"
    )
    said = []
    for line in process.stdout:
        said.append(line)
        if "held-out EM after step 2: lab-greedy" in line:
            break
    children = psutil.Process(process.pid).children(recursive=True)
    sockets = listening([psutil.Process(process.pid), *children])
    os.killpg(process.pid, signal.SIGINT)  # Ctrl-C reaches the whole group
    rest, _ = process.communicate(timeout=TIMEOUT_S)
    first = "".join(said) + rest
    assert process.returncode == 130, first
    for name in ("gcs_server", "raylet", "verl_credit_retriever", "TransferQueueController", "WorkerDict"):
        assert any(name in who for who, _ in sockets), (name, sockets)
    assert [(who, str(address)) for who, address in sockets if not address.is_loopback] == []
    assert "goes on from the last checkpoint" in first
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive
    assert "lab   0%" in first
    assert "advantage=turn-group-v1d | outcome=grpo | tokens=gtpo_sepa_hicra" in first
    rows = read_json_lines(run_dir / METRICS)[:2]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert isinstance(row["actor/pg_loss"], float)
        assert row["credit/planning/token_share"] > 0 and row["credit/token_weight/std"] > 0
        assert row["training/rollout_probs_diff_max"] < 1e-4
    # the first step is plain GRPO, which learns nothing from groups that all fail
    assert [row["credit/gain/scored"] for row in rows] == [0, 1] and rows[1][
        "credit/sync/weights_changed"
    ] == 1.0
    assert rows[1]["credit/gain/turns"] > 0 and rows[1]["credit/clip_scale/std"] > 0
    assert [row["step"] for row in read_json_lines(run_dir / VALIDATION)][:2] == [0, 2]
    assert (run_dir / "report.html").exists() and (run_dir / "curves.png").exists()

    process = start(lab, run_dir, "trainer.total_training_steps=3", "trainer.test_freq=-1")
    second, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, second
    assert [row["credit/sepa_lambda"] for row in read_json_lines(run_dir / METRICS)] == [0.1, 0.2, 0.3]
    assert "using the lab in" in second and "resume: exact, from step 2" in second
    assert [row["step"] for row in read_json_lines(run_dir / METRICS)] == [1, 2, 3]
    # step 2 was evaluated before the resume and is not evaluated again
    assert [row["step"] for row in read_json_lines(run_dir / VALIDATION)] == [0, 2]
    kinds = [row["kind"] for row in read_json_lines(run_dir / EVENTS)]
    assert kinds == ["banner", "attention", "log_probs", "resume", "banner", "attention", "log_probs"]
