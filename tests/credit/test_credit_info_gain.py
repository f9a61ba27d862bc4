"""Information gain from the scores of consecutive contexts."""

import math

import pytest
import torch

from verl_credit.credit import INFO_GAIN_TYPES, info_gain

SCORE = torch.tensor([[-3.0, -2.0, -0.5], [-1.0, -4.0, 0.0], [-2.0, 0.0, 0.0]])
MASK = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])
NAN, INF = float("nan"), float("inf")


def test_prob_diff_and_log_prob_diff():
    gain = info_gain(SCORE, MASK)
    p = [math.exp(-3), math.exp(-2), math.exp(-0.5)]
    assert gain.info_gain_B_K[0].tolist() == pytest.approx([p[1] - p[0], p[2] - p[1]])
    assert gain.info_gain_B_K[1].tolist() == pytest.approx([math.exp(-4) - math.exp(-1), 0])
    assert gain.turn_mask_B_K.tolist() == [[True, True], [True, False], [False, False]]
    assert not gain.failed_B_K.any()
    gain = info_gain(SCORE, MASK, info_gain_type="log_prob_diff")
    assert gain.info_gain_B_K.tolist() == [[1.0, 1.5], [-3.0, 0.0], [0.0, 0.0]]


def test_log_gap_is_the_log_of_how_much_the_gap_shrank():
    """d = .1 - score: from -3 to -.5 it is .6 of 3.1; a sure answer leaves .1, and half precision may round above 0."""
    gain = info_gain(SCORE, MASK, info_gain_type="log_gap").info_gain_B_K
    assert gain[0].tolist() == pytest.approx([math.log(3.1 / 2.1), math.log(2.1 / 0.6)])
    assert gain[1].tolist() == pytest.approx([math.log(1.1 / 4.1), 0])
    sure = info_gain(torch.tensor([[-1.0, 5e-4]]), torch.ones(1, 2), info_gain_type="log_gap")
    assert sure.info_gain_B_K.item() == pytest.approx(math.log(1.1 / 0.1))


def test_without_a_first_turn_gain_the_prompt_is_not_read():
    prior = info_gain(SCORE, MASK)
    score, mask = SCORE.clone(), MASK.clone()
    score[:, 0], mask[0, 0] = NAN, False
    none = info_gain(score, mask, first_turn="none")
    assert none.turn_mask_B_K.tolist() == [[False, True], [False, False], [False, False]]
    assert none.info_gain_B_K[0, 1] == prior.info_gain_B_K[0, 1]
    assert none.failed_gains == none.failed_rows == 0


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("kind", INFO_GAIN_TYPES)
def test_a_score_that_is_not_finite_costs_its_two_gains_and_is_counted(bad, kind):
    score = SCORE.clone()
    score[0, 1] = bad
    score[2, 2] = bad  # not a context of that row
    gain = info_gain(score, MASK, info_gain_type=kind)
    assert gain.turn_mask_B_K.tolist() == info_gain(SCORE, MASK).turn_mask_B_K.tolist()
    assert (gain.failed_gains, gain.failed_rows) == (2, 1)
    assert gain.info_gain_B_K[0].isnan().all() and gain.failed_B_K[0].all()
    assert gain.info_gain_B_K[1:].isfinite().all()
    assert gain.info_gain_B_K[1, 0] == info_gain(SCORE, MASK, info_gain_type=kind).info_gain_B_K[1, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_differences_are_taken_in_float64(dtype):
    gain = info_gain(SCORE.to(dtype), MASK)
    exact = info_gain(SCORE.to(dtype).double(), MASK).info_gain_B_K
    assert gain.info_gain_B_K.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(gain.info_gain_B_K.double(), exact, rtol=1e-6, atol=1e-8)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="did you mean 'prob_diff'"):
        info_gain(SCORE, MASK, info_gain_type="prob_dif")
    with pytest.raises(ValueError, match="first_turn='zero'.*accepted: prior, none"):
        info_gain(SCORE, MASK, first_turn="zero")
    with pytest.raises(ValueError, match="context_mask_B_K1 has shape"):
        info_gain(SCORE, MASK[:2])
    with pytest.raises(ValueError, match="score_B_K1 has shape"):
        info_gain(SCORE[:, 0], MASK[:, 0])
    with pytest.raises(ValueError, match="score_B_K1 row 1 has a score above 0"):
        info_gain(torch.tensor([[-1.0, -1.0], [-1.0, 0.4]]), torch.ones(2, 2))
