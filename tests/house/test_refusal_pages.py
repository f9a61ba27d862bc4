"""The page of refusals has what is printed now."""

import runpy
from pathlib import Path

import pytest

from kit.recipes import composed_once
from verl_credit.recipe import compose

PAGES = Path(__file__).parents[2] / "evidence" / "refusals"


@pytest.mark.slow
def test_the_page_has_the_refusals_that_are_printed(monkeypatch):
    monkeypatch.setattr(compose, "compose_recipe", composed_once)
    page = runpy.run_path(str(PAGES / "printed.py"))["page"]()
    assert page == (PAGES / "README.md").read_text(encoding="utf-8")
