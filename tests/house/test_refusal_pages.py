"""Pages of findings name tests that exist, no finding without a test passes for closed, refusals are quoted as printed."""

import ast
import re
import runpy
from functools import cache
from pathlib import Path

import pytest

from kit.recipes import composed_once
from verl_credit.recipe import compose

TESTS = Path(__file__).parents[1]
PAGES = TESTS.parent / "evidence" / "refusals"
each_page = pytest.mark.parametrize(("page", "least"), [("newcomer.md", 35), ("strangers.md", 45)])


@cache
def names_in(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@each_page
def test_every_test_that_the_page_names_exists(page, least):
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (PAGES / page).read_text(encoding="utf-8"))
    assert len(named) > least
    assert [f"{file}::{name}" for file, name in named if name not in names_in(file)] == []


@each_page
def test_a_finding_has_a_test_or_is_open(page, least):
    rows = [line for line in (PAGES / page).read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    findings = [row for row in rows if not row.startswith("| found")]
    assert len(findings) > least
    assert [row for row in findings if "::" not in row and "**open**" not in row] == []


@pytest.mark.slow
def test_the_page_has_the_refusals_that_are_printed(monkeypatch):
    monkeypatch.setattr(compose, "compose_recipe", composed_once)
    page = runpy.run_path(str(PAGES / "printed.py"))["page"]()
    assert page == (PAGES / "README.md").read_text(encoding="utf-8")
