"""Asks a vulnerability service about pinned dependencies: `python evidence/reliability/supply.py [FILE ...]`.

FILE: pinned requirements; without one, .ci/constraints-cpu.txt. PIP_AUDIT: the program, else `pip-audit` on the PATH (it
goes into an environment of its own). Exits 1 for a known vulnerability, 2 where a dependency was not looked up: pip-audit
itself then says "No known vulnerabilities found", and exits 0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PINNED = ROOT / ".ci" / "constraints-cpu.txt"


def audit(file: Path, service: str) -> list[dict]:
    """What pip-audit reports of each dependency. Raises RuntimeError where it reports nothing."""
    words = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json", "--timeout", "20"]
    command = [os.environ.get("PIP_AUDIT", "pip-audit"), "--vulnerability-service", service, *words]
    try:
        done = subprocess.run([*command, "--requirement", str(file)], capture_output=True, text=True)
        return json.loads(done.stdout)["dependencies"]
    except OSError as error:
        raise RuntimeError(f"pip-audit does not start: {error}") from error
    except ValueError as error:
        why = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise RuntimeError(f"pip-audit reported nothing: {why}") from error


def told(file: Path, dependencies: list[dict]) -> tuple[list[str], int]:
    """(lines, exit code)."""
    skipped = [one for one in dependencies if "skip_reason" in one]
    lines = [f"{file.name}: {len(dependencies) - len(skipped)} of {len(dependencies)} dependencies looked up"]
    if skipped:
        lines.append(f"NOT RUN for {len(skipped)}, first: {skipped[0]['skip_reason']}")
    known = [(one, problem) for one in dependencies for problem in one.get("vulns", ())]
    for one, problem in known:
        fixed = ", ".join(problem["fix_versions"]) or "no version"
        lines.append(f"{one['name']} {one['version']}: {problem['id']}, fixed in {fixed}")
    return lines, 1 if known else 2 if skipped or not dependencies else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=[PINNED])
    parser.add_argument("--service", default="pypi", choices=["pypi", "osv"])
    chosen = parser.parse_args()
    worst = 0
    for file in chosen.files:
        try:
            lines, code = told(file, audit(file, chosen.service))
        except RuntimeError as error:
            lines, code = [f"NOT RUN for {file.name}: {error}"], 2
        print("\n".join(lines))
        worst = code if worst != 1 and code else worst
    return worst


if __name__ == "__main__":
    sys.exit(main())
