"""The page of a newcomer's findings names tests that exist, and no finding without a test passes for closed."""

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "evidence" / "refusals" / "newcomer.md"


@cache
def names_in(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_test_that_the_page_names_exists():
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE.read_text(encoding="utf-8"))
    assert len(named) > 50
    assert [f"{file}::{name}" for file, name in named if name not in names_in(file)] == []


def test_a_finding_has_a_test_or_is_open():
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    findings = [row for row in rows if not row.startswith("| found")]
    assert len(findings) > 35
    assert [row for row in findings if "::" not in row and "**open**" not in row] == []
