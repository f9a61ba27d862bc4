"""Values of verl's critic in a step of credit: which token's they are, and what the critic learns."""

from dataclasses import replace

import pytest
import torch

from kit.byte_world import make_tokenizer
from kit.turn_rows import Row, estimate, lost_row, padding_row, step_inputs, turn_batch
from verl_credit.host.step.estimator import bring_turns, info_gain_advantage

ROWS = [
    Row(("search", "a page", "again", "Paris, the city", "Paris"), "Who?"),
    Row(("search", "a page", "Rome"), "Who?"),
    Row(("Paris",), "Where?"),
    Row(("look", "a page", "Paris"), "Where?"),
]
BATCH = [*ROWS, lost_row("connect", prompt="Who?"), padding_row(ROWS[0])]
OUTCOMES, GROUPS = [1.0, 0, 1, 0, 0, 1], [0, 0, 1, 1, 0, 2]
GAINS = [[0.25, 0.5], [0.125], [], [float("nan")], [], []]  # the last one is lost
GAMMA = 0.5


@pytest.fixture(scope="module")
def turns():
    return turn_batch(BATCH, make_tokenizer())


def inputs_of(turns, **changes):
    given = {"info_gain_norm_mode": "turn_gae", "turn_values": "critic", "lam": 0.5, "gamma": GAMMA}
    value_B_T = torch.randn(turns.turn_ids_B_T.shape, generator=torch.Generator().manual_seed(2))
    return replace(step_inputs(turns, GAINS, **given | changes), value_B_T=value_B_T)


def wanted_return(row: int, turn: int) -> float:
    rewards = [*GAINS[row], OUTCOMES[row]]
    return sum(GAMMA**place * reward for place, reward in enumerate(rewards[turn:]))


def test_a_turn_has_the_value_of_its_first_token_whatever_the_outcome(turns):
    inputs = inputs_of(turns)
    for outcomes in (OUTCOMES, [1 - outcome for outcome in OUTCOMES]):
        value_B_K1 = estimate(inputs, turns, outcomes, GROUPS).tables.optional["value_B_K1"]
        for row, ids in enumerate(turns.turn_ids_B_T.tolist()):
            for turn in range(3):
                first = ids.index(turn) if row < len(ROWS) and turn in ids else None
                wanted = 0.0 if first is None else float(inputs.value_B_T[row, first])
                assert value_B_K1[row, turn] == wanted


def test_the_critic_learns_the_return_of_the_turn_and_itself_where_none_is_known(turns):
    inputs, mask_B_T = inputs_of(turns), turns.response_mask_B_T.clone()
    mask_B_T[0, 0] = 0  # rejected by rollout correction
    rewards_B_T = torch.zeros(mask_B_T.shape)
    rewards_B_T[:, -1] = torch.tensor(OUTCOMES)
    with bring_turns(inputs) as found:
        advantage_B_T, return_B_T = info_gain_advantage(rewards_B_T, mask_B_T, index=GROUPS)
    assert torch.equal(advantage_B_T, found.credit.advantage_B_T) and return_B_T.dtype == torch.float32
    learned = 0
    for row, ids in enumerate(turns.turn_ids_B_T.tolist()):
        for place, turn in enumerate(ids):
            known = row < len(ROWS) and turn >= 0 and mask_B_T[row, place] and (row, turn) != (3, 0)
            wanted = wanted_return(row, turn) if known else float(inputs.value_B_T[row, place])
            assert float(return_B_T[row, place]) == pytest.approx(wanted, abs=1e-6), (row, place)
            learned += bool(known)
    assert learned > 20 and return_B_T.isfinite().all()


def test_the_metrics_are_those_of_the_values(turns):
    inputs = inputs_of(turns)
    step = estimate(inputs, turns, OUTCOMES, GROUPS)
    value_B_K1, states = (
        step.tables.optional["value_B_K1"],
        [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (3, 1)],
    )
    value = torch.stack([value_B_K1[state] for state in states])
    known = torch.tensor([wanted_return(*state) for state in states]).double()
    wanted = 1 - (known - value).square().mean() / known.var(correction=0)
    assert step.metrics["credit/values/explained_variance"] == pytest.approx(float(wanted))
    assert "credit/values/states" not in step.metrics


def test_a_trainer_without_a_critic_stops(turns):
    with pytest.raises(ValueError, match="needs verl's critic, which this trainer does not have"):
        estimate(replace(inputs_of(turns), value_B_T=None), turns, OUTCOMES, GROUPS)
