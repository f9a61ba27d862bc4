"""``lineage.*``: the table that records a run as a trial, its hypothesis, and the rule that keeps it (docs/lineage.md)."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from verl_credit.config.keys.run import Folder
from verl_credit.config.keys.section import Expected, Section
from verl_credit.names import bare_id

LONGEST_TEXT = 20_000  # characters; readers of the table accept fields of at most 131,072


def _cell(text: str) -> str:
    if len(text) > LONGEST_TEXT or "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
        raise ValueError(
            f"expected a text of at most {LONGEST_TEXT:,} characters, without null bytes and broken Unicode"
        )
    return text


Text = Annotated[str, AfterValidator(_cell)]


class Lineage(Section):
    prefix = "lineage"

    dir: Folder | None = None
    """Folder of the table of trials, results.tsv; null: `lineage` beside run_dir, so that runs with one parent share it."""
    exp_id: Annotated[str, AfterValidator(bare_id), Expected("a name (put digits in quotes)")] | None = None
    """The trial's id, without `exp_`; null: the name of run_dir. A number is added where the id has ended already."""
    parent: Annotated[Text, Expected("a trial's id (put digits in quotes)")] | None = None
    """Trial that this trial changes; null: the trial that run_dir resumes, else the best trial at the start."""
    hypothesis: Text | None = None
    """The change that is tried and its expected effect; `train -m` asks for it on a terminal."""
    expected_delta: (
        Annotated[float | Text, Expected(f"a text of at most {LONGEST_TEXT:,} characters or a number")] | None
    ) = None
    """The expected change of the metric; `train -m` asks for it on a terminal."""
    threshold: Annotated[float, Field(ge=0)] = 0.005
    """A finished trial is kept when it gains more than this over the best kept trial; else it is discarded."""
    metric: (
        Annotated[
            str, Field(pattern=r"^val-"), Expected("a name in validation.jsonl, which begins with val-")
        ]
        | None
    ) = None
    """The held-out metric that decides; null: exact match over all questions, greedy where it is evaluated."""
    lower_is_better: bool = False
    """A smaller value of the metric is better."""
