"""provenance: the turn that first showed the page that the answer cites or whose text holds it."""

import pytest
import torch

from kit.byte_world import make_tokenizer
from kit.turn_rows import Row, lost_row, turn_batch
from verl_credit.turns.rollout.book import RowRecord
from verl_credit.turns.step.signals.built_in import find_signal
from verl_credit.turns.step.signals.signal import StepRows

SEARCHES = [(0, ["p1", "p2"]), (1, ["p2", "p3"]), (2, [])]
PAGES = ("Page 1: The Nile flows north", "Page 1: Rivers\nIn Cairo, the Nile.", "")


def rewards(last, searches=SEARCHES, pages=PAGES):
    tokenizer = make_tokenizer()
    found = [{"turn": turn, "query": "q", "pages": ids} for turn, ids in searches]
    texts = [text for page in pages for text in ("ask", page or "nothing")]
    rows = [Row((*texts, last), record=RowRecord(searches=found)), lost_row("connect")]
    turns = turn_batch(rows, tokenizer)
    no_B_K = torch.zeros(2, len(pages))
    step = StepRows(
        turns, tokenizer.decode, torch.zeros(2), torch.zeros(2, dtype=torch.long), no_B_K, no_B_K.bool()
    )
    reward_B_K, has_B_K = find_signal("provenance", {}).rewards(step)
    assert not has_B_K[1].any()
    pairs = zip(reward_B_K[0].tolist(), has_B_K[0].tolist(), strict=True)
    return [value if has else None for value, has in pairs]


@pytest.mark.parametrize(
    "last, expected",
    [
        ("<answer>Nile</answer>", [1, 0, 0]),  # both first turns hold it: the first of them
        ("<answer>the CAIRO.</answer>", [0, 1, 0]),  # as answers are compared
        ("<answer>Nil</answer>", [0, 0, 0]),  # no whole word of a page
        ("I do not know. Cairo?", [0, 0, 0]),  # no answer
        ("<answer>Cairo</answer> [p2]", [1, 0, 0]),  # the page was shown first in turn 0
        ("[p3] and [p1]: <answer>Nile</answer>", [1, 1, 0]),
        ("<think>[p3]</think><answer>Nile</answer>", [1, 0, 0]),  # a thought cites nothing
        ("<answer>p3</answer>", [0, 0, 0]),  # a page is cited in brackets
    ],
)
def test_the_first_turn_with_the_page_has_1_and_the_other_searches_0(last, expected):
    assert rewards(last) == expected


def test_a_turn_without_a_search_has_no_reward_whatever_it_observed():
    only = rewards("<answer>Nile</answer>", searches=[(1, ["p3"])])
    assert only == [None, 1, None]
    assert rewards("<answer>Nile</answer>", searches=[]) == [None, None, None]
