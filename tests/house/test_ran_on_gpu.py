"""README, changelog and docs beside evidence/gpu: what they say has run on a GPU did, and what they say has not did not."""

import json
import re
from pathlib import Path

import pytest

from verl_credit.recipe.files import shipped_recipes

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "evidence" / "gpu" / "results"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]

RECIPES = set(shipped_recipes())
KERNELS = {"varlen": "credit_varlen", "sdpa": "credit_sdpa", "flex": "credit_flex"}
ENGINES = {f"rollout.name={name}" for name in ("vllm", "hf", "sglang")}
TRAINERS = {"credit", "credit_colocate_async", "credit_separate_async"}
SCORERS = {"branch", "server"}
SEVERAL = "several GPUs"
SUBJECTS = RECIPES | set(KERNELS.values()) | ENGINES | TRAINERS | SCORERS | {SEVERAL}
# Pages speak of these together; what is said of "none" of them is said of each.
TOGETHER = {
    "the GPU recipes": {"multihop_qwen3_4b", "singlehop_qwen3_4b", "spark_qwen3_4b", "math_sepa"},
    "recipes for larger models": {"multihop_qwen3_4b", "singlehop_qwen3_4b", "spark_qwen3_4b", "math_sepa"},
}
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


# --- the table of docs/compatibility.md ---


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


# --- sentences ---

NOT_RUN = re.compile(
    r"\b(?:not|never)(?: \w+){0,3} (?:run|ran|tried)\b|\bnone\b.{0,60}\bhas (?:been run|run|finished)\b|\bno step finished\b"
    r"|\bfinished no step\b|\bnever (?:finished|made) a step\b|\buntried\b|\bon (?:a CPU|CPUs) only\b",
    re.IGNORECASE,
)
NO_GPU = re.compile(r"\bfor lack of (?:a )?GPUs?\b|\bno GPU (?:was at hand|has run)\b", re.IGNORECASE)
RAN = re.compile(r"\b(?:ran|run|trained|made|finished|measured|right|steps?)\b")
DEVICE = re.compile(r"\b(?:GPUs?|H100s?)\b|CPUs? only", re.IGNORECASE)
MORE_THAN_ONE = re.compile(r"\b(?:[2-9] x|eight GPUs|[2-9] GPUs|several GPUs)\b")
CONTINUES = re.compile(r"\W*(?:It|Not|Never|None|They|These|This)\b")


def blocks(page: str) -> list[str]:
    """Paragraphs, entries of lists and rows of tables, without code."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    return [" ".join(block.split()) for block in re.split(r"\n\s*\n|\n(?=\||\s*- |#)", text) if block.strip()]


def named(text: str) -> set[str]:
    codes = re.findall(r"`([^`]+)`", text)
    found = {
        subject
        for subject in SUBJECTS
        if any(
            code == subject or re.search(rf"(?:name[ =]|^){re.escape(subject)}(?![\w-])", code)
            for code in codes
        )
    }
    found |= {f"rollout.name={name}" for name in codes if f"rollout.name={name}" in ENGINES}
    found |= {one for code in codes for one in ENGINES if code.endswith(one)}
    together = [subjects for words, subjects in TOGETHER.items() if words in text]
    return found.union(*together, {SEVERAL} if SEVERAL in text else set())


def wrong(page: str, has_run: set[str]) -> list[str]:
    """The sentences that the results contradict. "It was not run" speaks of what its paragraph or row begins with."""
    found = []
    for block in blocks(page):
        row = block.startswith("|")
        sentences = re.split(r"(?<=[.!?])\**\s+|\s\|\s" if row else r"(?<=[.!?])\**\s+", block)
        first = next((subjects for one in sentences if (subjects := named(one))), set())
        for sentence in sentences:
            where = block if row else sentence
            subjects = named(sentence) or (first if row or CONTINUES.match(sentence) else set())
            if MORE_THAN_ONE.search(where):
                subjects = {SEVERAL}
            denied = NOT_RUN.search(sentence) and DEVICE.search(block) and subjects & has_run
            claimed = not NOT_RUN.search(sentence) and RAN.search(sentence) and over_claims(sentence, has_run)
            if denied or claimed or (NO_GPU.search(sentence) and has_run):
                found.append(sentence)
    return found


def over_claims(sentence: str, has_run: set[str]) -> bool:
    clauses = re.split(r"[,;:()]", sentence)
    return any(re.search(r"\bH100\b", clause) and named(clause) - has_run for clause in clauses)


def test_no_page_contradicts_the_results(has_run):
    assert {page.name: lost for page in PAGES if (lost := wrong(page.read_text(), has_run))} == {}


@pytest.mark.parametrize(
    "stale",
    [
        "| `credit_varlen` | GPUs with a wheel. **Not run yet, for lack of a GPU;** its tables are tested |",
        "| `credit_flex` | GPUs, by name; `auto` tries it last (run on a CPU only) |",
        "**None of the GPU recipes has finished a step on a GPU.** The tests compose each.",
        "On a GPU the recipes for larger models have finished no step.",
        "| `multihop_qwen3_4b` | qwen3-4b | 1 x h100 | 55.0 of 79.1 | not run |",
        "`multihop_qwen3_4b` trains 4 B. **It has not been run on a GPU**, and the start says so.",
        "Those in full size have not been run, for lack of GPUs.",
        "*Several processes were run on a CPU only; no GPU was at hand.*",
        "`credit_separate_async` ran for 30 steps on an H100.",
        "`math_sepa` made two steps on one H100.",
    ],
)
def test_a_stale_sentence_is_found(stale):
    has_run = {"credit_varlen", "credit_flex", "multihop_qwen3_4b", "credit"}
    assert wrong(f"# A page\n\nA line before it.\n\n{stale}\n", has_run)


@pytest.mark.parametrize(
    "true",
    [
        "| `multihop_qwen3_4b` | qwen3-4b | 8 x h100 | 55.0 of 79.1 | not run |",
        "**NCCL between several GPUs has not been run.**",
        "`rollout.name=sglang` is handed on. **It has not been run on a GPU**, and `train` says so.",
        "`credit_separate_async` for 3 steps on a CPU, and `credit` for 30 with vLLM on an H100.",
        "`multihop_qwen3_4b` made 2 steps on an H100. `math_sepa` has not been run on a GPU.",
        "On one H100 `math_sepa`, with a small policy, got as far as its first rollouts.",
    ],
)
def test_a_true_sentence_is_left_alone(true):
    assert wrong(true, {"multihop_qwen3_4b", "credit"}) == []


def test_results_of_a_cpu_and_runs_without_a_step_are_none():
    part = {"part": "half_hour", "gpus": 1, "tiny": False, "rows": []}
    run = {"recipe": "math_sepa", "engine": "hf", "state": "cut"}
    before = ran([])
    assert ran([part | {"runs": {"R2": run | {"state": "not run"}}}]) == before
    assert ran([part | {"runs": {"R2": run | {"steps": "0 of 2"}}}]) == before
    assert ran([part | {"runs": {"R2": run | {"steps": "1 of 2"}}, "gpus": 0}]) == before
    assert ran([part | {"runs": {"R2": run | {"steps": "1 of 2"}}}]) - before == {
        "math_sepa",
        "rollout.name=hf",
    }
    kernels = {"part": "kernels", "gpus": 1, "tiny": False}
    assert "credit_varlen" not in ran([kernels | {"rows": [{"name": "varlen, fp32", "found": {}}]}])
