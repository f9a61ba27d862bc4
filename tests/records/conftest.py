"""Reports are drawn only where a test looks at that."""

import pytest


@pytest.fixture
def pictures():
    """Asked for by the tests that look at the pictures; the others do without, to be quick."""


@pytest.fixture(autouse=True)
def _draw_only_where_asked(request, monkeypatch):
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr("verl_credit.records.report.page.panel_data_uri", lambda panel: "data:,")
