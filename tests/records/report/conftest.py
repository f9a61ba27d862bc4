"""What the report's tests share: a run's folder."""

import pytest

from kit.report_page import write_run


@pytest.fixture
def run_dir(tmp_path):
    write_run(tmp_path)
    return tmp_path
