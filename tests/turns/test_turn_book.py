"""Turn ids follow what the loop says, never what tokens look like."""

import pytest

from verl_credit.turns.rollout.book import TurnBook, rewards_of_turns
from verl_credit.turns.score.requests import context_ends


def written(*events):
    """events: ("turn", n policy tokens) or ("obs", n tokens) -> closed turn ids."""
    book, mask = TurnBook(), []
    for kind, count in events:
        mask += [int(kind == "turn")] * count
        (book.wrote_turn if kind == "turn" else book.observed)(mask)
    return book.close(len(mask)), mask


def test_ids_count_turns_and_skip_observations():
    ids, _ = written(("turn", 2), ("obs", 3), ("turn", 1), ("obs", 1), ("turn", 2))
    assert ids == [0, 0, -1, -1, -1, 1, -1, 2, 2]


def test_boundary_tokens_inside_a_turn_are_not_the_policys():
    book, mask = TurnBook(), [1, 1, 0]  # verl may append a template token (a newline) to a turn
    book.wrote_turn(mask)
    mask += [0, 0]
    book.observed(mask)
    mask += [1]
    book.wrote_turn(mask)
    assert book.close(len(mask)) == [0, 0, -1, -1, -1, 1]


def test_close_keeps_what_fits_and_refuses_missing_ids():
    book = TurnBook()
    book.wrote_turn([1, 1, 1])
    assert book.close(2) == [0, 0]
    with pytest.raises(ValueError, match="turn ids for 3 tokens, but the response has 4"):
        book.close(4)


def test_context_after_a_search_ends_where_the_next_turn_begins():
    ids, _ = written(("turn", 2), ("obs", 3), ("turn", 1), ("obs", 1), ("turn", 2))
    assert context_ends(ids, "observation") == [5, 7]
    assert context_ends(ids, "call") == [2, 6]


def test_a_row_without_searches_has_no_context_but_the_prompt():
    ids, _ = written(("turn", 4))
    assert context_ends(ids, "observation") == [] == context_ends(ids, "call")
    assert context_ends([-1, -1], "observation") == []


def test_a_turns_reward_is_the_sum_over_its_calls_and_none_where_no_call_has_one():
    calls = [
        {"turn": k, "reward": r} for k, r in ((0, 0.5), (0, None), (0, -0.75), (2, None), (3, 0.0), (4, 9.0))
    ]
    assert rewards_of_turns(calls, 4) == [-0.25, None, None, 0.0]
    assert rewards_of_turns(calls, 0) == [] and rewards_of_turns([], 2) == [None, None]
