"""A campaign's page in a real browser: the kept runs of a shipped campaign. `make test-browser`."""

import tarfile
from pathlib import Path

import pytest

from kit.browser import CONTRAST, keep
from verl_credit.study.campaign.report import write_campaign_report

pytestmark = pytest.mark.browser
ARCHIVE = Path(__file__).resolve().parents[3] / "evidence/campaigns/raw.tar.xz"


@pytest.fixture
def page(browser, tmp_path):
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / "turn_modes_lab"
    browser.problems.clear()
    browser.theme("light")
    browser.size(1280, 1000)
    browser.open(write_campaign_report(folder))
    yield browser
    assert browser.problems == []


def test_every_part_is_there_and_nothing_is_fetched(page):
    assert page.value("document.title") == "Campaign: turn_modes_lab"
    titles = page.value("[...document.querySelectorAll('h2')].map(e => e.textContent)")
    assert titles[:4] == ["Verdicts", "Learning curves", "Area under the curve", "Comparisons"]
    images = page.value(
        "[...document.images].map(i => [i.complete, i.naturalWidth > 300, i.alt.length > 20])"
    )
    assert len(images) >= 2 and all(all(image) for image in images)
    fetched = "performance.getEntriesByType('resource').filter(e => !e.name.startsWith('data:')).length"
    assert page.value(fetched) == 0
    rows = page.value("[...document.querySelectorAll('tbody th')].map(e => e.textContent)")
    assert {"grpo", "joint", "turn-group-v1d", "joint \u2212 grpo"} <= set(rows)
    keep(page, "campaign")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_is_readable_in_both_themes(page, theme):
    page.theme(theme)
    ground = page.value("getComputedStyle(document.documentElement).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") is (theme == "light")
    assert page.value(CONTRAST) >= 4.5
    keep(page, f"campaign-{theme}")


@pytest.mark.parametrize("width", [1280, 400])
def test_text_at_200_percent_and_narrow_screens_need_no_scrolling_sideways(page, width):
    """Wide tables scroll by themselves, and the keyboard reaches them."""
    page.size(width, 900)
    page.value("document.documentElement.style.fontSize = '200%'")
    assert page.value("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert page.value("[...document.querySelectorAll('.wide')].every(e => e.tabIndex === 0)")
    keep(page, f"campaign-{width}")
