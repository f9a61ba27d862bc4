"""What the tests of pages in a real browser share."""

import os
from pathlib import Path

PICTURES = os.environ.get("BROWSER_PICTURES")


def keep(browser, name, selector=None):
    if PICTURES:
        browser.screenshot(Path(PICTURES) / f"{name}.png", selector)


def keep_view(browser, name, selector):
    """The window with the element at its top."""
    browser.value(f"document.querySelector({selector!r}).scrollIntoView()")
    if PICTURES:
        browser.screenshot(Path(PICTURES) / f"{name}.png", whole=False)


# The least contrast of a visible text with its ground, as WCAG 2 measures it.
CONTRAST = """(() => {
  const channel = (c) => { c /= 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
  const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const ground = (e) => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] > 0) return c; } return [255, 255, 255]; };
  const ratio = (e) => { const [a, b] = [luminance(rgb(getComputedStyle(e).color)), luminance(ground(e))].sort();
    return (b + 0.05) / (a + 0.05); };
  return Math.min(...[...document.querySelectorAll('main *')].filter((e) => e.offsetParent && !e.disabled
    && [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())).map(ratio));
})()"""
