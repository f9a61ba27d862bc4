"""A tool that gave other answers: the table says in how many continuations, and what that does to A*."""

import pytest

from verl_credit.study.fidelity.measure import Result
from verl_credit.study.fidelity.measures import Measure
from verl_credit.study.fidelity.report import table


@pytest.mark.parametrize("share, said", [(0.0, 0), (0.25, 1)])
def test_the_table_says_where_a_star_is_not_exact(share, said):
    unknown = Measure(None, None, None)
    result = Result([[]], [], [], {}, [], 1, unknown, (0, 0), [], 3, share)
    lines = [line for line in table("p", result) if "gave another answer" in line]
    assert len(lines) == said and all("25% of continuations" in line for line in lines)
