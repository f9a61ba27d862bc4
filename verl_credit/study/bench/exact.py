"""The candidate's exact bias, beside modes that are known (`fidelity.exact`)."""

from __future__ import annotations

from collections.abc import Sequence

from verl_credit.study.bench.candidate import Candidate
from verl_credit.study.fidelity.exact.question import QUESTIONS
from verl_credit.study.fidelity.exact.subjects import outcome_credit_of
from verl_credit.study.fidelity.exact.table import bias_rows

GROUP_SIZES, STOPS = (2, 4, 8), (0.1, 0.3, 0.7)
TOGETHER = " and ".join(question.name for question in QUESTIONS.values())


def exact_rows(candidates: Sequence[Candidate]) -> list[dict[str, object]]:
    """Rows of `bias_rows` for both questions together; GRPO and RLOO first. Modes whose scope is the batch lack size 8."""
    credits = [outcome_credit_of("grpo"), outcome_credit_of("rloo"), *(c.exact() for c in candidates)]
    rows = bias_rows(credits, group_sizes=GROUP_SIZES, stops=STOPS)
    return [row for row in rows if row["questions"] == TOGETHER]


def cosine_span(rows: Sequence[dict], mode: str) -> tuple[float | None, float | None]:
    """Lowest and highest cosine of E[g] with grad E[r]; None where the mode's expected gradient is 0 everywhere."""
    found = [row["cosine"] for row in rows if row["mode"] == mode and row["cosine"] is not None]
    return (min(found), max(found)) if found else (None, None)
