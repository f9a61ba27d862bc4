"""Keys of the trial that a run is: where it is written down, what it tries, when it is kept (docs/lineage.md)."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from verl_credit.config.keys.run import Folder
from verl_credit.config.keys.section import Expected, Section
from verl_credit.names import bare_id

LONGEST_TEXT = 20_000  # characters; readers of the table stop at 131,072


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
    """Trial that this one is a change of; null: the one that run_dir goes on from, else the best one at the start."""
    hypothesis: Text | None = None
    """What is tried, and what it should change; `train -m` asks for it on a terminal."""
    expected_delta: (
        Annotated[float | Text, Expected(f"a text of at most {LONGEST_TEXT:,} characters or a number")] | None
    ) = None
    """The change of the metric that is expected; `train -m` asks for it on a terminal."""
    threshold: Annotated[float, Field(ge=0)] = 0.005
    """A finished trial is kept when it gains more than this over the best one kept; else it is discarded."""
    metric: (
        Annotated[
            str, Field(pattern=r"^val-"), Expected("a name in validation.jsonl, which begins with val-")
        ]
        | None
    ) = None
    """The held-out metric that decides; null: exact match, greedy where that is evaluated, over all questions."""
    lower_is_better: bool = False
    """A smaller value of the metric is better."""
