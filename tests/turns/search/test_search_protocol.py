"""The arguments of a call of the search tool."""

import pytest

from verl_credit.turns.search.protocol import bad_query_reason


@pytest.mark.parametrize("depth", ["[" * 100_000, '{"a":' * 100_000, '{"query": ' + "[" * 100_000])
def test_arguments_that_are_nested_without_end_are_a_mistake_of_the_policy(depth):
    reason, query = bad_query_reason(depth)
    assert reason.startswith("Error: the arguments of search are not valid JSON (") and not query
