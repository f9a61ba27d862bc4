"""Which test runs which line: a plugin of pytest (`-p line_map`) that writes one JSON file.

The file: {test: {"seconds": ..., "passed": ..., "lines": {source file: [line, ...]}}}. What runs while modules are imported
stands under "import". Environment: LINE_MAP (the file), LINE_MAP_FOLDERS (with ":" between them, below the current folder).
"""

import json
import os
import time
from pathlib import Path

import pytest

IMPORT = "import"


class LineMap:
    def __init__(self):
        import coverage  # here, because the constants of this file are read without it

        self.root = Path.cwd()
        self.tests = {IMPORT: {"seconds": 0.0, "passed": True, "lines": {}}}
        include = [f"{self.root / folder}/*" for folder in os.environ["LINE_MAP_FOLDERS"].split(":")]
        self.tracer = coverage.Coverage(data_file=None, config_file=False, include=include)
        self.tracer.start()
        self.tracer.switch_context(IMPORT)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        entry = self.tests[item.nodeid] = {"seconds": 0.0, "passed": True, "lines": {}}
        self.tracer.switch_context(item.nodeid)
        began = time.perf_counter()
        result = yield
        entry["seconds"] = round(time.perf_counter() - began, 3)
        self.tracer.switch_context(IMPORT)
        return result

    def pytest_runtest_logreport(self, report):
        self.tests[report.nodeid]["passed"] &= report.outcome != "failed"

    def pytest_sessionfinish(self):
        self.tracer.stop()
        data = self.tracer.get_data()
        for file in data.measured_files():
            for line, tests in data.contexts_by_lineno(file).items():
                for test in filter(None, tests):
                    self.tests[test]["lines"].setdefault(str(Path(file).relative_to(self.root)), []).append(
                        line
                    )
        Path(os.environ["LINE_MAP"]).write_text(json.dumps(self.tests))


def pytest_configure(config):
    config.pluginmanager.register(LineMap())
