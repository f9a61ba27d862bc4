"""The table of what ran where, beside evidence/gpu: what it says has run on a GPU did, and what it says has not did not."""

import json
import re
from pathlib import Path

import pytest

from verl_credit.recipe.recipe_files import shipped_recipes

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "evidence" / "gpu" / "results"
RECIPES = set(shipped_recipes())
KERNELS = {"varlen": "credit_varlen", "sdpa": "credit_sdpa", "flex": "credit_flex"}
ENGINES = {f"rollout.name={name}" for name in ("vllm", "hf", "sglang")}
TRAINERS = {"credit", "credit_colocate_async", "credit_separate_async"}
SCORERS = {"branch", "server"}
SEVERAL = "several GPUs"
SUBJECTS = RECIPES | set(KERNELS.values()) | ENGINES | TRAINERS | SCORERS | {SEVERAL}
# Runs of the trainer that no part of evidence/gpu started: the page that has them, and its words.
ELSEWHERE = {
    "real_math_cpu": ("evidence/real/README.md", "verl-credit train --config-name real_math_cpu hardware=h100x1"),
    "credit": ("evidence/async/README.md", "On an H100, with vLLM: `credit_colocate_async` beside `credit`"),
    "credit_colocate_async": ("evidence/async/README.md", "On an H100, with vLLM: `credit_colocate_async`"),
}  # fmt: skip


def ran(contents: list[dict]) -> set[str]:
    """The subjects of which a GPU's results have a number, and those of `ELSEWHERE`."""
    found = {subject for subject, (page, words) in ELSEWHERE.items() if words in (ROOT / page).read_text()}
    for content in contents:
        if not content["gpus"] or content["tiny"]:
            continue
        rows = [row for row in content["rows"] if row["found"]]
        if content["part"] == "kernels":
            found |= {KERNELS[row["name"].partition(",")[0]] for row in rows}
        if content["part"] == "branches" and rows:
            found.add("branch")
        if content["part"] == "server" and rows:
            found |= {"server", "rollout.name=vllm"}
        for run in content.get("runs", {}).values():
            if int(str(run.get("steps", 0)).split()[0]):  # "2 of 3"
                found |= {run["recipe"], f"rollout.name={run['engine']}", "credit"}
                found |= {SEVERAL} if content["gpus"] > 1 else set()
    return found


@pytest.fixture(scope="module")
def has_run():
    return ran([json.loads(path.read_text()) for path in RESULTS.glob("*/*.json")])


def status(page: str) -> dict[str, bool]:
    """Subject -> whether the first table of docs/compatibility.md says that it ran on the H100."""
    table = page.partition("# What ran where\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    assert len(rows) > 8 and rows[0][-1].strip() == "on one H100"
    listed = [(subject, row[-1]) for row in rows[1:] for subject in named(row[0])]
    assert len(listed) == len(dict(listed))
    return {subject: not cell.strip().startswith("never") for subject, cell in listed}


def test_the_table_of_what_ran_is_whole_and_agrees_with_the_results(has_run):
    found = status((ROOT / "docs" / "compatibility.md").read_text())
    assert found == {subject: subject in has_run for subject in SUBJECTS}


def named(text: str) -> set[str]:
    codes = re.findall(r"`([^`]+)`", text)
    return {one for one in SUBJECTS if any(code == one or one.endswith(f"name={code}") for code in codes)} | (
        {SEVERAL} if SEVERAL in text else set()
    )
