"""Turn ids to tables and back."""

import pytest
import torch

from verl_credit.credit import spread, turn_credit, turn_table

IDS = torch.tensor([[0, 0, 1, 1, 2, 2, 2, 2], [0, 0, 0, 9, 9, 9, 9, 9], [-1, -1, 0, 3, 1, -1, -1, -1]])
MASK = torch.tensor([[1, 1, 0, 1, 0, 0, 1, 1], [1, 1, 1, 0, 0, 0, 0, 0], [0, 0, 1, 0, 1, 0, 0, 0]])


def test_table():
    table = turn_table(IDS, MASK)
    assert table.n_turns_B.tolist() == [3, 1, 2]
    assert table.n_tool_turns_B.tolist() == [2, 0, 1]
    assert table.n_tokens_B_K1.tolist() == [[2, 1, 2], [3, 0, 0], [1, 1, 0]]
    assert table.tool_turn_mask_B_K.tolist() == [[True, True], [False, False], [True, False]]


def test_spread_reads_ids_only_where_the_mask_is_1():
    values = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
    want = [[1, 1, 0, 2, 0, 0, 3, 3], [4, 4, 4, 0, 0, 0, 0, 0], [0, 0, 7, 0, 8, 0, 0, 0]]
    assert spread(values, IDS, MASK).tolist() == want
    assert spread(values, IDS.int(), MASK.bool(), fill=1.0)[1].tolist() == [4, 4, 4, 1, 1, 1, 1, 1]
    assert spread(values.half(), IDS, MASK.float()).dtype == torch.float16


def test_every_answer_turn_reads_the_outcome():
    """The tables of `turn_credit` spread without knowing how many tool turns a row has."""
    outcome = torch.tensor([1.0, 0.0, 0.5])
    table = turn_table(IDS, MASK)
    gain = torch.tensor([[0.3, 0.1], [0.0, 0.0], [0.2, 0.0]])
    credit = turn_credit(outcome, gain, table.tool_turn_mask_B_K, torch.zeros(3).long())
    advantage = spread(credit.advantage_B_K1, IDS, MASK)
    last = torch.tensor([7, 2, 4])
    assert torch.equal(advantage[torch.arange(3), last], credit.outcome_advantage_B)
    scale = spread(credit.clip_scale_B_K1, IDS, MASK, fill=1.0)
    assert torch.equal(scale[torch.arange(3), last], torch.ones(3))
    assert scale[0, 0] != 1
    assert (advantage[MASK == 0] == 0).all()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[0, 0, 1], [0, 2, 2]], "row 1, policy token at position 1: turn 2; expected 0 or 1"),
        ([[0, 0, 1], [0, 1, 0]], "row 1, policy token at position 2: turn 0; expected 1 or 2"),
        ([[0, 0, 1], [1, 1, 2]], r"row 1, policy token at position 0: turn 1; expected 0 \("),
        ([[0, 0, 1], [-1, 0, 1]], r"row 1, policy token at position 0: turn -1; expected 0 \("),
        ([[0, 0, 1], [0, -1, 1]], "row 1, policy token at position 1: turn -1; expected 0 or 1"),
    ],
)
def test_bad_ids_are_named(ids, message):
    with pytest.raises(ValueError, match=message):
        turn_table(torch.tensor(ids), torch.ones(2, 3))


def test_bad_arguments_are_named():
    values = torch.zeros(3, 2)
    with pytest.raises(ValueError, match="row 0 holds turn 2 .* turns 0 to 1"):
        spread(values, IDS, MASK)
    with pytest.raises(ValueError, match="values_B_K1 has shape"):
        spread(values[:2], IDS, MASK)
    with pytest.raises(ValueError, match="response_mask_B_T has shape"):
        turn_table(IDS, MASK[:, :3])
    with pytest.raises(ValueError, match="response_mask_B_T is not a mask: row 1"):
        turn_table(IDS, MASK + 2 * (torch.arange(3) == 1)[:, None])
    with pytest.raises(TypeError, match="turn ids are integers"):
        turn_table(IDS.float(), MASK)
    with pytest.raises(ValueError, match="expected rows x response tokens"):
        turn_table(IDS[0], MASK[0])


def test_rows_without_policy_tokens():
    nothing = torch.zeros_like(MASK)
    assert turn_table(IDS, nothing).n_turns_B.tolist() == [0, 0, 0]
    assert turn_table(IDS, nothing).n_tool_turns_B.tolist() == [0, 0, 0]
    assert (spread(torch.ones(3, 1), IDS, nothing) == 0).all()
    assert turn_table(IDS[:, :0], MASK[:, :0]).n_turns_B.tolist() == [0, 0, 0]
    assert spread(torch.ones(3, 1), IDS[:, :0], MASK[:, :0]).shape == (3, 0)
    assert turn_table(IDS[:0], MASK[:0]).n_tokens_B_K1.shape == (0, 1)  # a column for the answer, as always
