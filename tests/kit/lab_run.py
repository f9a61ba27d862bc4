"""`verl-credit train` on the lab's recipe up to the start of Ray."""

from __future__ import annotations

from verl_credit.cli import main


def run(capsys, tmp_path, *overrides):
    code = main(["train", "--config-name", "lab", f"run_dir={tmp_path}", *overrides])
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    return code, lines
