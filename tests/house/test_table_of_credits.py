"""evidence/credits: the page has a row for each credit, and its table is what the lines give."""

import json
import runpy
from pathlib import Path

from verl_credit.study.table_row import ROWS

CREDITS = Path(__file__).parents[2] / "evidence" / "credits"
page = runpy.run_path(str(CREDITS / "page.py"))


def rows(table):
    """(credit, n)"""
    return [tuple(line.split(" | ")[:2]) for line in table.splitlines()[2:]]


def test_the_page_has_a_row_for_each_credit_and_is_made_of_the_lines():
    made = page["table"](CREDITS)
    measured = {json.loads(line)["row"] for line in (CREDITS / ROWS).read_text().splitlines()}
    assert len(rows(made)) == len(measured) == len(set(rows(made)))
    assert made in (CREDITS / "README.md").read_text()


def test_a_line_of_another_credit_is_a_row_after_the_declared_ones(tmp_path):
    of_joint = [line for line in (CREDITS / ROWS).read_text().splitlines() if '"row": "joint"' in line]
    mine = [json.dumps(json.loads(line) | {"row": "my_module:my_mode"}) for line in of_joint]
    (tmp_path / ROWS).write_text("\n".join([(CREDITS / ROWS).read_text().strip(), *mine, ""]))
    before, after = (page["table"](folder).splitlines() for folder in (CREDITS, tmp_path))
    assert after[:-1] == before and after[-1].startswith("| my_module:my_mode | 8 |") and of_joint


def test_every_registered_credit_is_declared():
    from verl_credit.credit import MODES
    from verl_credit.credit.outcome import OUTCOME_OPERATORS

    names = {row.name for row in page["declared"]()}
    methods = {path.stem for path in (CREDITS.parents[1] / "recipes/methods").glob("[a-z]*.py")}
    assert {*MODES} | methods - {"provenance"} <= names
    operators = {name for name in OUTCOME_OPERATORS if name != "grpo"}
    assert {f"none, outcome_operator {name}" for name in operators} <= names
