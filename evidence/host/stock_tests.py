"""verl's own CPU tests, from a checkout of verl, with the installed verl: without our plugin, and with all it registers.

    stock_tests.py TREE              both runs must have the same results, and fail only where known_failures.txt says so
    stock_tests.py TREE --write      writes known_failures.txt anew
    stock_tests.py TREE --only TEXT  only the files whose path has TEXT

The tests are those of tests/**/*_on_cpu.py that start neither Ray nor TransferQueue and need no engine beside FSDP. They run
in a copy without the checkout's verl, which they would import otherwise. This file is also the plugin of pytest that records
the results.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
KNOWN = HERE / "known_failures.txt"
LEFT_OUT = re.compile(
    r"ray\.init|ray\.remote|tq\.init|(import|from) (vllm|sglang|megatron)|megatron\.core|importorskip\(.megatron"
)
RESULTS, WITH = "STOCK_RESULTS", "STOCK_WITH_PLUGIN"  # variables of the environment
LONGEST_S = 60


def files_of(tree: Path, only: str = "") -> list[str]:
    found = sorted(path for path in tree.glob("tests/**/*_on_cpu.py") if only in str(path.relative_to(tree)))
    return [str(path.relative_to(tree)) for path in found if not LEFT_OUT.search(path.read_text())]


def results_of(tree: Path, files: list[str], *, plugin: bool) -> dict[str, str]:
    """test -> passed, failed, error or skipped, by one process of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(tree / "tests", Path(folder, "tests"))
        environment = {name: value for name, value in os.environ.items() if name != WITH}
        environment |= {
            "PYTHONPATH": str(HERE),
            "HF_HUB_OFFLINE": "1",
            "VERL_USE_EXTERNAL_PLUGINS": "auto" if plugin else "none",
            RESULTS: str(Path(folder, "results.json")),
            **({WITH: "1"} if plugin else {}),
        }
        options = "-q", "-p", Path(__file__).stem, "-p", "no:cacheprovider", "--continue-on-collection-errors"
        command = [sys.executable, "-m", "pytest", *options, "--tb=line", *files]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if not Path(environment[RESULTS]).exists():
            raise SystemExit(
                f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
            )
        return json.loads(Path(environment[RESULTS]).read_text())


def known_failures() -> set[str]:
    lines = KNOWN.read_text().splitlines() if KNOWN.exists() else []
    return {line for line in lines if line and not line.startswith("#")}


def faults(without: dict[str, str], with_plugin: dict[str, str], known: set[str]) -> list[str]:
    """Lines about tests whose results differ, and about failures that are not known."""
    found = []
    for test in sorted({*without, *with_plugin}):
        one, other = without.get(test, "not run"), with_plugin.get(test, "not run")
        if one != other:
            found.append(f"{test}: {one} without the plugin, {other} with it")
        elif one in ("failed", "error") and test not in known:
            found.append(f"{test}: {one}, and known_failures.txt does not have it")
    return found


# --- the plugin of pytest ------------------------------------------------------------------------------------------------

_outcomes: dict[str, str] = {}


def pytest_configure(config) -> None:
    if os.environ.get(WITH):
        from verl_credit.host import registry
        from verl_credit.host.rollout import env_agent, search_agent  # noqa: F401
        from verl_credit.host.step import async_trainers  # noqa: F401

        registry.register_parts()
        registry.register_engines()
        registry.require_registered("this process", registry.registered_names())


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    def stop(*_):
        raise TimeoutError(f"longer than {LONGEST_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LONGEST_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def pytest_runtest_logreport(report) -> None:
    if report.when == "call" or report.outcome != "passed":
        result = "error" if report.when != "call" and report.failed else report.outcome
        _outcomes[report.nodeid] = result


def pytest_collectreport(report) -> None:
    if report.failed:
        _outcomes[report.nodeid] = "error"


def pytest_sessionfinish(session) -> None:
    Path(os.environ[RESULTS]).write_text(json.dumps(_outcomes))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tree", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    files = files_of(options.tree, options.only)
    if not files:
        parser.error(f"{options.tree} has no tests/**/*_on_cpu.py: name a checkout of verl")
    print(f"{len(files)} files of {options.tree}", flush=True)
    results = {}
    for plugin in (False, True):
        results[plugin] = results_of(options.tree, files, plugin=plugin)
        print(
            "with the plugin:" if plugin else "without it:",
            dict(Counter(results[plugin].values())),
            flush=True,
        )
    if options.write:
        failed = sorted(test for test, result in results[False].items() if result in ("failed", "error"))
        head = "# Tests of a verl checkout that fail with the installed verl, with and without the plugin (stock_tests.py)."
        KNOWN.write_text("\n".join([head, *failed]) + "\n")
    found = faults(results[False], results[True], known_failures())
    print(*(found or [f"the same results; {len(known_failures())} known failures"]), sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
