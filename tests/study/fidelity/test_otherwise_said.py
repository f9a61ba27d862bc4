"""A tool that gave other answers: the table says in how many continuations, and what that does to A*."""

import pytest

from verl_credit.study.fidelity.result import Result, table
from verl_credit.study.fidelity.true_values import ScoredTurn, Value
from verl_credit.study.stats import Measure


@pytest.mark.parametrize("otherwise, lines_wanted", [(0, 0), (1, 1)])
def test_the_table_says_where_a_star_is_not_exact(otherwise, lines_wanted):
    values = {"a": Value("a", "10", otherwise), "b": Value("b", "11")}
    turn = ScoredTurn(0, 0, 0, "ending", "a", None, 0.5, 0.0, 1.0, 0.1, 0.01, 0.0, None, 1.0)
    result = Result([[]], [turn], values, [], {}, {}, 1, Measure(None), (0, 0))
    lines = [line for line in table("p", result) if "gave another answer" in line]
    assert len(lines) == lines_wanted and all("25% of continuations" in line for line in lines)
