"""Reports are drawn, and have every alpha and gamma, only where a test looks at that."""

import pytest


@pytest.fixture
def pictures():
    """Asked for by the tests that look at the pictures; the others do without, to be quick."""


@pytest.fixture(autouse=True)
def _draw_only_where_asked(request, monkeypatch):
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr("verl_credit.records.report.page.panel_data_uri", lambda panel: "data:,")
        monkeypatch.setattr("verl_credit.records.report.write.curves_png", lambda panels: b"")
        monkeypatch.setattr("verl_credit.records.report.curves.saved", lambda figure, kind, **options: b"")


@pytest.fixture
def all_settings():
    """Asked for by the tests that look at the lens's settings of alpha and gamma; the others have the run's own."""


@pytest.fixture(autouse=True)
def _switch_only_where_asked(request, monkeypatch):
    if not {"all_settings", "browser"} & set(request.fixturenames):
        for name in ("ALPHAS", "GAMMAS"):
            monkeypatch.setattr(f"verl_credit.records.report.lens_settings.{name}", ())
