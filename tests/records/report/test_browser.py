"""The report in a real browser: no script error, every part there, keys, themes, large text. `make test-browser`."""

import json

import pytest

from kit.browser import CONTRAST, keep, keep_view
from kit.credit_tables import ROWS, rollout, write_step
from kit.report_page import report, training, write_lines, write_run

pytestmark = pytest.mark.browser
ATTACK = (
    '</script><script>document.title="owned"</script><img src=x onerror=\'document.title="owned"\'>\u202e\x00'
)


@pytest.fixture
def pictures():
    """All of these tests look at the pictures."""


@pytest.fixture
def page(browser, tmp_path, pictures):
    """A report with two groups and three steps, opened."""
    write_run(tmp_path)
    stops = {"credit/stop/answer": 0.75, "credit/stop/bad_call": 0.25}
    sepa = {"credit/sepa_lambda": 0.5}
    phases = {"timing_s/gen": 5.0, "timing_s/update_actor": 3.0}
    write_lines(tmp_path / "metrics.jsonl", [training(step) | stops | sepa | phases for step in (1, 2, 3)])
    for step in (2, 3):
        write_step(tmp_path, step, transform_mode="gtpo_sepa_hicra", reject=[1])
    report(tmp_path)
    browser.problems.clear()
    browser.theme("light")
    browser.size(1280, 1000)
    browser.open(tmp_path / "report.html")
    yield browser
    assert browser.problems == []


def text(browser, selector):
    return browser.value(f"document.querySelector({json.dumps(selector)}).textContent")


def choose(browser, name, value):
    browser.value(
        f"(() => {{ const s = document.getElementById('lens-{name}'); s.value = {json.dumps(value)};"
        " s.dispatchEvent(new Event('change', {bubbles: true})); })()"
    )


def test_every_part_is_there(page):
    titles = page.value("[...document.querySelectorAll('figcaption b')].map(e => e.textContent)")
    for wanted in ("Exact match", "SEPA's lambda", "Time by phase", "Why rollouts stopped"):  # fmt: skip
        assert wanted in titles
    images = page.value("[...document.images].map(i => [i.complete, i.naturalWidth > 0, i.alt.length > 20])")
    assert len(images) == len(titles) - titles.count("") and all(all(image) for image in images)
    assert page.value("document.querySelectorAll('.rollout').length") == 3
    assert text(page, "#lens-said").startswith("In this group every rollout is right, and 2 searches")
    fetched = "performance.getEntriesByType('resource').filter(e => !e.name.startsWith('data:')).length"
    assert page.value(fetched) == 0
    keep(page, "report")


def test_another_group_is_a_switch_away_and_the_choice_lasts_when_the_page_is_read_again(page):
    for address in ("#lens=%", "#lens=9"):
        page.value(f"location.hash = {json.dumps(address)}")
        page.reload()
        assert page.value("document.getElementById('lens-group').value") == "0"
    choose(page, "group", "2")
    for _ in range(2):
        assert page.value("document.querySelectorAll('.rollout').length") == 2
        assert text(page, "#lens-said").startswith("In this group no rollout is right; no search")
        page.reload()


def test_the_keyboard_reaches_and_moves_everything(page):
    """Tab from the first control on; the arrow changes a native select; in a turn the arrows walk over its tokens."""
    choose(page, "group", "1")  # its first turn has planning tokens
    page.value("document.getElementById('lens-group').focus()")
    reached = []
    for _ in range(3):
        reached.append(page.value("document.activeElement.id || document.activeElement.className"))
        page.press("Tab")
    assert reached == ["lens-group", "lens-rollouts", "tokens"]
    page.value("document.getElementById('lens-group').focus()")
    page.press("ArrowUp")
    assert page.value("document.getElementById('lens-group').value") == "0"
    choose(page, "group", "1")
    page.value("document.querySelector('.tokens').focus()")
    first = text(page, "#lens-token")
    page.press("ArrowRight", "ArrowRight")
    third = text(page, "#lens-token")
    assert first.startswith("“l”: credit +") and third.startswith("“t”: credit +") and "planning" in third
    page.press("End")
    assert page.value(
        "document.querySelector('.current') === document.querySelector('.tokens').lastElementChild"
    )
    assert page.value("getComputedStyle(document.querySelector('.tokens:focus')).outlineStyle") != "none"


def test_hovering_reads_the_number(page):
    box = page.value(
        "(() => { const s = document.querySelectorAll('.tokens')[1].firstElementChild; s.scrollIntoView();"
        " const b = s.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
    )
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
    assert "credit +" in text(page, "#lens-token") and "rollout 1, turn 2" in text(page, "#lens-token")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_is_readable_in_both_themes(page, theme):
    """WCAG 2 AA: 4.5 to 1 for every visible text, shaded tokens included."""
    page.theme(theme)
    ground = page.value("getComputedStyle(document.documentElement).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") is (theme == "light")
    assert page.value(CONTRAST) >= 4.5
    keep(page, f"lens-{theme}", "#lens")


# Per scroll container: [is wider than its window, height of its scrollbar, fade, reached by Tab, room after its last part].
SCROLLS = """[...document.querySelectorAll('.wide, .scrolls, .rollouts')].map((e) => {
  e.scrollLeft = 0;
  const fade = getComputedStyle(e, '::after'), box = e.getBoundingClientRect(), wide = e.scrollWidth > e.clientWidth;
  e.scrollLeft = e.scrollWidth;
  const parts = [...e.querySelectorAll('tr > :last-child, .rollout')];
  const room = box.right - Math.max(...parts.map((p) => p.getBoundingClientRect().right)) - parseFloat(fade.width);
  e.scrollLeft = 0;
  return [wide, e.offsetHeight - e.clientHeight, fade.backgroundImage, e.tabIndex, room];
})"""
CREDITS = "[...document.querySelectorAll('#opening td:not(.absent)')].map(e => e.textContent)"


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_the_first_group_shows_both_credits_and_what_is_wide_scrolls_visibly(page, width, theme):
    page.size(width, 900)
    page.theme(theme)
    assert page.value("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    credits = page.value(CREDITS)
    assert len(credits) == 8 and all("this run" in one and "GRPO" in one for one in credits)
    assert page.value("document.querySelector('#opening td').getBoundingClientRect().right") <= width
    assert page.value("document.querySelector('section').id") == "opening"
    found = page.value(SCROLLS)
    assert len(found) >= 3
    for wide, bar, fade, tab, room in found:
        assert tab == 0 and (not wide or (bar >= 8 and "linear-gradient" in fade and room >= -1)), found
    opening, _, lens_of_rollouts = (one[0] for one in found[:3])
    assert (opening and lens_of_rollouts) is (width == 390)
    for part in ("header", "#opening", "#lens-rollouts"):
        keep_view(page, f"{part.removeprefix('#')}-{width}-{theme}", part)
    keep(page, f"report-{width}-{theme}")  # last: it hides the scrollbars


@pytest.mark.parametrize("width", [1280, 400])
def test_text_at_200_percent_and_narrow_screens_need_no_scrolling_sideways(page, width):
    page.size(width, 900)
    page.value("document.documentElement.style.fontSize = '200%'")
    assert page.value("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert page.value("parseFloat(getComputedStyle(document.querySelector('.tokens')).fontSize)") >= 26
    keep(page, f"large-{width}")


def test_planning_is_marked_without_colour(page):
    for kind, line in (("planning", "underline"), ("rejected", "line-through")):
        style = f"getComputedStyle(document.querySelector('.rollout .{kind}')).textDecorationLine"
        assert page.value(style) == line
    assert "negative credit" in page.value("document.querySelector('.against .lens-flag').textContent")


def test_hostile_text_stays_text(browser, tmp_path, pictures):
    write_run(tmp_path)
    rows = [rollout("call <b>" + ATTACK, ATTACK, "done", prompt=ATTACK), *ROWS[1:]]
    write_step(
        tmp_path, rows=rows, gains=[[0.4], [0.1], [0.6, 0.1], [], [0.3], [-0.1, 0.05], [], [0.0], [-0.2]]
    )
    report(tmp_path)
    browser.problems.clear()
    browser.open(tmp_path / "report.html")
    assert browser.problems == [] and "owned" not in browser.value("document.title")
    assert browser.value("document.querySelectorAll('#lens img, #lens-rollouts script').length") == 0
    everything = browser.value("document.getElementById('lens-data').textContent")
    assert "\u202e" not in everything and "[U+202E]" in everything


def test_a_script_of_someone_else_does_not_run(browser, tmp_path, pictures):
    """The page's policy, should an escape ever be missing."""
    write_run(tmp_path)
    write_step(tmp_path)
    path = tmp_path / "report.html"
    report(tmp_path)
    path.write_text(path.read_text().replace("<main>", "<main><script>document.title = 'owned'</script>"))
    browser.problems.clear()
    browser.open(path)
    assert browser.value("document.title") != "owned"
    assert any("Content Security Policy" in problem for problem in browser.problems)


def test_a_run_without_tables_has_no_lens_and_no_error(browser, tmp_path, pictures):
    write_run(tmp_path)
    report(tmp_path)
    browser.problems.clear()
    browser.open(tmp_path / "report.html")
    assert browser.problems == [] and "keep_rollouts.steps" in text(browser, "#lens")
