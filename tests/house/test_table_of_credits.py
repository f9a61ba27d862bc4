"""evidence/credits: the page has a row for each file, and its table is what the files give."""

import json
import runpy
import shutil
from pathlib import Path

import pytest

CREDITS = Path(__file__).parents[2] / "evidence" / "credits"
page = runpy.run_path(str(CREDITS / "page.py"))


def rows(table):
    """(credit, n)"""
    return [tuple(line.split(" | ")[:2]) for line in table.splitlines()[2:]]


def test_the_page_has_a_row_for_each_file_and_is_made_of_them():
    made = page["table"](CREDITS / "rows")
    assert len(rows(made)) == len(list((CREDITS / "rows").glob("*.json"))) == len(set(rows(made)))
    assert made in (CREDITS / "README.md").read_text()


@pytest.mark.slow
def test_one_file_adds_a_row_after_the_declared_ones(tmp_path):
    for file in (CREDITS / "rows").glob("*.json"):
        shutil.copyfile(file, tmp_path / file.name)
    of_joint = json.loads((tmp_path / "joint.json").read_text())
    (tmp_path / "mine.json").write_text(json.dumps(of_joint | {"row": "my_module:my_mode"}))
    before, after = (page["table"](folder).splitlines() for folder in (CREDITS / "rows", tmp_path))
    assert after[:-1] == before and after[-1].startswith("| my_module:my_mode | 8 |")


def test_every_registered_credit_is_declared():
    from verl_credit.credit import MODES
    from verl_credit.credit.outcome import OUTCOME_OPERATORS

    names = {row.name for row in page["declared"]()}
    methods = {path.stem for path in (CREDITS.parents[1] / "recipes/methods").glob("[a-z]*.py")}
    assert {*MODES} | methods - {"provenance"} <= names
    operators = {name for name in OUTCOME_OPERATORS if name != "grpo"}
    assert {f"none, outcome_operator {name}" for name in operators} <= names
