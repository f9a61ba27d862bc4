"""Compares the statements of `doctor` with the results of the part `kernels`."""

from __future__ import annotations

import json
import subprocess
import sys

from gpu import record as records
from gpu.machine import environment
from gpu.record import same

# doctor's check -> its kernel in the part `kernels`
CHECKS = {"attention credit_varlen": "varlen", "attention credit_sdpa": "sdpa"}
SOURCE = "verl-credit doctor"


def run(setting, record) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "verl_credit.cli", "doctor", "--json"], env=environment(),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip
    try:
        checks = {one["name"]: one for one in json.loads(done.stdout[done.stdout.index("{") :])["checks"]}
    except ValueError:
        record.off("doctor", f"exit code {done.returncode}: {done.stdout[-300:]}")
        return
    failures = [f"{name} ({one['found']})" for name, one in checks.items() if one["status"] == "fail"]
    record.add("doctor", {"failed": len(failures), "which": "; ".join(failures) or "none"})
    kernels = (records.read(record.path.with_name("kernels.json")) or {"rows": []})["rows"]
    for check, kernel in CHECKS.items():
        rows = [row for row in kernels if row["name"].startswith(f"{kernel}, bf16")]
        _check(record, check, checks.get(check), rows)


def _check(record, name: str, check: dict | None, rows: list[dict]) -> None:
    """doctor's check must pass exactly if the kernel's rows are ok."""
    tried = [row for row in rows if row["verdict"] != records.NOT_RUN]
    if check is None or not rows:
        record.not_run(name, "nothing to compare: `doctor` has no such check or `kernels` did not run")
        return
    if check["status"] == "skip":
        record.not_run(name, f"doctor does not try it: {check['found']}")
        return
    works = bool(tried) and all(row["verdict"] == records.OK for row in tried)
    found = {
        "doctor_passes": check["status"] == "pass",
        "doctor": check["found"],
        "kernels": "ok" if works else "off" if tried else "not run",
    }
    record.add(name, found, {"doctor_passes": same(works)}, SOURCE)
