"""A counterexample is made smaller as long as it still breaks its law, and no further."""

import pytest
import torch

from verl_credit.credit.laws.check import Example, smallest
from verl_credit.credit.laws.drawn_world import make_world
from verl_credit.credit.laws.laws import Broken
from verl_credit.credit.laws.subjects import own_subject


def centred(rewards):
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def undefined_for_two(rewards):
    if len(rewards) == 2:
        raise ValueError("two rewards")
    return centred(rewards)


def shrunk(breaks, seed, operator=centred):
    """What is left of a world of 13 rows for a law that does not hold where ``breaks(world)``."""

    def law(subject, world):
        subject.run(world.rows(torch.tensor([0])))
        subject.run(world)
        if breaks(world):
            raise Broken("it breaks", runs=1)

    return smallest(
        Example(law, make_world(seed), "as it was found"), own_subject(operator, operator.__name__)
    )


each_seed = pytest.mark.parametrize("seed", range(3))


@each_seed
def test_of_a_law_that_never_holds_one_token_is_left(seed):
    found = shrunk(lambda world: True, seed)
    assert found.world.turn_ids_B_T.tolist() == [[0]] and not found.world.has_gain_B_K.any()
    assert found.message == "it breaks" and len(found.runs) == 1


@pytest.mark.slow
@each_seed
def test_what_the_law_needs_stays_and_the_rest_becomes_plain(seed):
    world = shrunk(lambda world: len(world.outcome_B) >= 2 and world.mask_B_T.shape[1] >= 6, seed).world
    assert world.mask_B_T.shape == (2, 6) and not world.has_gain_B_K.any()
    assert len(world.group_B.unique()) == 1 and torch.equal(world.outcome_B, world.outcome_B.round())
    assert not world.planning_B_T.any()
    for table_B_T, elsewhere in ((world.log_prob_B_T, -1.0), (world.entropy_B_T, 1.0)):
        plain_B_T = torch.where(world.mask_B_T, table_B_T.round(decimals=1), elsewhere)
        assert torch.equal(table_B_T, plain_B_T)


@pytest.mark.slow
@each_seed
def test_a_turn_with_a_reward_keeps_the_answer_after_it(seed):
    world = shrunk(lambda world: world.has_gain_B_K.any(), seed).world
    assert world.turn_ids_B_T.tolist() == [[0, 1]]
    assert world.has_gain_B_K[0].tolist() == [True, False, False]
    assert torch.equal(world.gain_B_K, world.gain_B_K.round(decimals=1)) and world.gain_B_K[
        0, 1:
    ].tolist() == [0, 0]


@pytest.mark.slow
def test_columns_without_a_policy_token_go_first():
    wide = make_world(0).wider(0, 40)

    def law(subject, world):
        if world.mask_B_T.sum() == wide.mask_B_T.sum():
            raise Broken("it breaks")

    found = smallest(Example(law, wide, "as it was found"), own_subject(centred, "centred"))
    assert found.world.mask_B_T.any(dim=0).all()


@pytest.mark.slow
@each_seed
def test_of_an_operator_that_raises_the_call_that_raised_is_shown(seed):
    found = shrunk(lambda world: False, seed, undefined_for_two)
    assert (found.message, len(found.world.outcome_B)) == ("ValueError: two rewards", 2)
    assert [str(run.result) for run in found.runs] == ["two rewards"]
