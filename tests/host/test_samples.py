"""Samples: each turn of a kept rollout stands beside its own numbers and those of its siblings."""

import pytest

from kit.byte_world import make_tokenizer
from kit.credit_tables import write_tables
from kit.turn_rows import Row, credited, lost_row, padding_row, turn_batch
from verl_credit.records.run.rollouts import keep_samples, read_samples
from verl_credit.records.run.table_files import ROLLOUTS, TURNS, table_path, tables_of
from verl_credit.turns.rollout.book import RowRecord


def row(name, searches):
    parts = [text for k in range(searches) for text in (f"{name} call {k};", f"page {k};")]
    record = RowRecord("answer", searches, searches=[{"turn": k, "query": "q"} for k in range(searches)])
    return Row((*parts, f"{name} says x"), f"{name}?", record=record)


BATCH = [
    row("a", 0),
    row("b", 2),  # same question as a and e
    padding_row(row("a", 0)),
    lost_row("connect", prompt="lost?"),
    row("c", 1),
    row("d", 1),  # same question as c
    row("e", 2),
]
GROUPS = ["p", "p", "pad", "q", "q", "q", "p"]
GAINS = [[], [0.5, None], [], [], [0.0], [-0.25], [None, 0.125]]
OUTCOMES = [0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def turns(tokenizer):
    return turn_batch(BATCH, tokenizer)


@pytest.fixture(scope="module")
def step(turns):
    return credited(turns, GAINS, OUTCOMES, GROUPS)


def samples(folder, step, groups=None):
    """By question, in the order in which a reader gets them."""
    write_tables(folder, step, 1, GROUPS, groups)
    rows, problems = read_samples(folder, 1)
    assert not problems
    return {row["question"]: row for row in rows}


def test_the_longest_come_first(step, tmp_path):
    """b and e have three turns, c and d two, a one. Lost rows and padding are not among them."""
    assert list(samples(tmp_path, step)) == ["b?", "e?", "c?", "d?", "a?"]


def test_of_an_older_step_the_longest_of_each_group_stays_with_all_siblings_numbers(step, tmp_path):
    before = samples(tmp_path, step)
    keep_samples(tmp_path, 1)
    rows, problems = read_samples(tmp_path, 1)
    assert not problems and not tables_of(tmp_path, ROLLOUTS)
    assert {row["question"]: row for row in rows} == {name: before[name] for name in ("b?", "c?")}


@pytest.mark.parametrize("kind", [TURNS, ROLLOUTS])
def test_tables_that_are_damaged_are_named(step, tmp_path, kind):
    samples(tmp_path, step)
    path = table_path(tmp_path, kind, 1)
    path.write_bytes(path.read_bytes()[:-100])
    rows, (problem,) = read_samples(tmp_path, 1)
    assert not rows and str(path) in problem


def test_a_turn_without_a_gain_has_none_and_a_gain_of_zero_is_one(step, tmp_path):
    gains = {
        question: [turn["reward"] for turn in row["turns"]]
        for question, row in samples(tmp_path, step).items()
    }
    assert gains == {
        "b?": [0.5, None, None],
        "e?": [None, 0.125, None],
        "c?": [0.0, None],
        "d?": [-0.25, None],
        "a?": [None],
    }


def test_numbers_are_those_of_the_turn(step, tmp_path):
    credit = step.credit
    assert credit.advantage_B_K[4, 0] != credit.outcome_advantage_B[4]  # tool turn and answer turn differ
    for place, shown in zip([1, 6, 4, 5, 0], samples(tmp_path, step).values(), strict=True):
        tool_turns = len(GAINS[place])
        assert [turn["advantage"] for turn in shown["turns"]] == [
            *credit.advantage_B_K[place, :tool_turns].float().tolist(),
            credit.outcome_advantage_B[place].float().item(),
        ]
        assert [turn["clip_scale"] for turn in shown["turns"]] == [
            *credit.clip_scale_B_K[place, :tool_turns].float().tolist(),
            1.0,
        ]


def test_every_sample_has_its_whole_group_in_numbers(step, tmp_path):
    """p: a, b and e, of which two searched; q: c and d. The lost row and the padding are no siblings."""
    shown = samples(tmp_path, step)
    assert [[one["outcome"] for one in shown[name]["group"]] for name in ("b?", "c?")] == [[0, 1, 1], [1, 0]]
    assert {name: row["place"] for name, row in shown.items()} == {
        "a?": 0,
        "b?": 1,
        "e?": 2,
        "c?": 0,
        "d?": 1,
    }
    assert shown["b?"]["group"] == shown["a?"]["group"]
    for row in shown.values():
        own = row["group"][row["place"]]
        assert own["turns"] == [{name: turn[name] for name in own["turns"][0]} for turn in row["turns"]]
