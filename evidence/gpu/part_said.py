"""Compares the statements of `doctor` and `plan` with the results of the other parts."""

from __future__ import annotations

import json

from gpu import record as records
from gpu import runs
from gpu.record import at_most, same

# doctor's check -> its kernel in the part `kernels`
CHECKS = {"flash-attn": "varlen", "sdpa": "sdpa", "flex-attention": "flex"}
SOURCE = "verl-credit doctor, verl-credit plan"


def run(setting, record) -> None:
    code, printed = runs.command("doctor", "--json")
    try:
        checks = {one["name"]: one for one in json.loads(printed[printed.index("{") :])["checks"]}
    except ValueError:
        record.off("doctor", f"exit code {code}: {printed[-300:]}")
        return
    failures = [f"{name} ({one['found']})" for name, one in checks.items() if one["status"] == "fail"]
    steps = _rows(record, "steps")
    ran = [row for row in steps if row["name"].endswith(": step") and row["found"]]
    found = {"failed": len(failures), "which": "; ".join(failures) or "none", "recipes_that_ran": len(ran)}
    record.add("doctor", found, {"failed": at_most(0)} if ran else {}, SOURCE)
    kernels = _rows(record, "kernels")
    for check, kernel in CHECKS.items():
        rows = [row for row in kernels if row["name"].startswith(f"{kernel}, bf16")]
        _check(record, check, checks.get(check), rows)
    off = [row["name"] for row in steps if row["verdict"] == records.OFF]
    if steps:
        found = {"rows": len(steps), "off": len(off), "which": ", ".join(off) or "none"}
        record.add("plan", found, {"off": at_most(0)}, SOURCE)
    else:
        record.not_run("plan", "no recipe was tried here")


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


def _rows(record, part: str) -> list[dict]:
    return (records.read(record.path.with_name(f"{part}.json")) or {"rows": []})["rows"]
