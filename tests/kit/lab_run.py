"""`verl-credit train` on the lab's recipe up to the start of Ray."""

from __future__ import annotations

from pathlib import Path

from verl_credit.cli import main
from verl_credit.cli.train import start as train_module
from verl_credit.records.run import events
from verl_credit.records.run.files import METRICS, VALIDATION, append_json


def run(capsys, tmp_path, *overrides):
    code = main(["train", "--config-name", "lab", f"run_dir={tmp_path}", *overrides])
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    return code, lines


def launches(monkeypatch):
    """What stands for Ray; called with the error that it raises after some steps, a note that it leaves, and what the last
    evaluation found."""
    from verl_credit.host.process import launch

    def set_up(error=None, steps=2, note=None, found=None):
        def stand_in(config, say):
            folder = Path(config.run_dir)
            for step in range(1, steps + 1):
                append_json(folder / METRICS, {"step": step})
            if found is not None:
                append_json(folder / VALIDATION, {"step": steps, **found})
            if note is not None:
                events.record(folder, *note)
            if error is not None:
                raise error

        monkeypatch.setattr(launch, "launch", stand_in)

    for name in ("_prepare_world", "_preflight"):
        monkeypatch.setattr(train_module, name, lambda *_: None)
    monkeypatch.setattr("verl_credit.records.report.write.write_report", lambda run_dir: run_dir)
    set_up.failed = launch.RunFailed
    return set_up
