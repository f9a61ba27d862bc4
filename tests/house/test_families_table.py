"""The table of families (evidence/families): a right family agrees, another model differs, the page has every family."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kit.families import FAMILIES
from kit.tiny_engine import single_rank

FOLDER = Path(__file__).parents[2] / "evidence" / "families"
sys.path.insert(0, str(FOLDER.parent))

from families import measure, templates  # noqa: E402
from families.table import MARKS, line, markdown, numbers  # noqa: E402

ROUNDING = 1e-4


COLUMNS = ("rows", "gradients", "branch", "by_rows", "drawn", "prompt")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A family beside itself, and beside a model whose last norm has other weights."""
    folder = tmp_path_factory.mktemp("families")
    with single_rank():
        same, other = (measure.Family("qwen3", folder / name) for name in ("same", "other"))
        with torch.no_grad():
            other.eager.model.norm.weight.mul_(1.5)
        return {"same": same.measure(), "other": other.measure()}


@pytest.mark.slow
def test_a_right_family_agrees_in_every_column(results):
    found = results["same"]
    assert all(getattr(found, column) < ROUNDING for column in COLUMNS)
    assert found.refused == ""


@pytest.mark.slow
def test_another_model_differs_in_every_column(results):
    assert all(getattr(results["other"], column) > 100 * ROUNDING for column in COLUMNS)


def test_a_family_that_cannot_be_built_is_a_row_with_the_reason(tmp_path, monkeypatch):
    def fail(self):
        raise ValueError("no | such\nattention")

    for part in ("_engine", "_rollouts"):
        monkeypatch.setattr(measure.Family, part, fail)
    result = measure.Family("llama", tmp_path / "llama").measure()
    assert line("llama", result).count("no \\| such attention") == 2


def test_the_page_has_a_row_of_numbers_for_every_family():
    table = (FOLDER / "README.md").read_text().partition(MARKS[0])[2].partition(MARKS[1])[0]
    written = json.loads((FOLDER / "numbers.json").read_text())["families"]
    rows = [row.split("|")[1].strip() for row in table.splitlines() if row.startswith("|")][2:]
    assert rows == list(written) == list(FAMILIES)


def test_what_is_computed_with_the_keys_of_the_run_is_exact():
    table = json.loads((FOLDER / "numbers.json").read_text())
    of_columns = {
        family: [row[table["columns"].index(column)] for column in COLUMNS]
        for family, row in table["families"].items()
    }
    wrong = {family: row for family, row in of_columns.items() if any(not (n or 0) < ROUNDING for n in row)}
    assert wrong == {}


def test_numbers_have_two_digits_and_cells_one():
    result = replace(measure.Result(), keys="auto, packed, branch", rows=1.2345e-6)
    assert numbers({"llama": result})["families"]["llama"] == [result.keys, 1.2e-6, *[None] * 5]
    assert (
        markdown({"llama": result}).splitlines()[-1]
        == "| llama | auto, packed, branch | 1e-06 |  |  |  |  |  | 6e-06, 2e-06, 4e-06 |  |"
    )


CHATML = (
    "<|im_start|>system\n{{ tools | tojson }}{{ strftime_now('%d') if model_dates }}<|im_end|>\n"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    "template, place, cell",
    [
        (CHATML, 1, "qwen3"),
        (CHATML, 2, "written"),
        (CHATML, 3, "hermes"),
        (CHATML, 4, "both written"),
        (CHATML, 7, ""),
        (CHATML.replace("tools", "none"), 2, "refused: writes the same text with and without"),
        (CHATML.replace("{{ c.function | tojson }}", "search: {{ c.function.arguments.query }}"), 3, "none"),
        (CHATML.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"), 4, "left out"),
        (CHATML.replace(" if model_dates", ""), 7, "today's"),
    ],
)
def test_a_template_is_a_row_of_what_the_checks_find(template, place, cell, tmp_path):
    file = tmp_path / "qwen3@mine.jinja"
    file.write_text(template)
    found = templates.Template(file, tmp_path).cells()[place]
    assert found.startswith(cell) and bool(found) == bool(cell)
