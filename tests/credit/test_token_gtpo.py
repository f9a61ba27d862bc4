"""GTPO weights, SEPA's pooling and its variants, HICRA: worked numbers. Loops over tokens: `test_token_credit`."""

import math

import pytest
import torch

from verl_credit.credit.token.gtpo import gtpo_weights, hicra, sepa_amp, sepa_amp_c, sepa_pool

# The published example of ten tokens, planning the third and the seventh; advantage 1, beta 0.1.
S = torch.tensor([[0.2, 0.3, 1.8, 0.1, 0.9, 0.2, 2.1, 0.3, 0.1, 0.2]], dtype=torch.float64)
PLAN = torch.tensor([[0, 0, 1, 0, 0, 0, 1, 0, 0, 0]]).bool()
ALL = torch.ones_like(PLAN)
RAW = [0.932258, 0.948387, 1.190323, 0.916129, 1.045161, 0.932258, 1.238710, 0.948387, 0.916129, 0.932258]
POOLED = [0.939315, 0.947379, 1.190323, 0.93125, 0.995766, 0.939315, 1.23871, 0.947379, 0.93125, 0.939315]
NAN = math.nan


def close(ours, expected, atol=6e-7):
    torch.testing.assert_close(ours[0], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=atol)


def test_worked_weights():
    weight = gtpo_weights(S, ALL, beta=0.1)
    close(weight, RAW)
    assert torch.equal(weight, gtpo_weights(S, ALL))  # 0.1 is the default
    assert float(weight.sum()) == pytest.approx(10)
    # Token 5 is the most uncertain execution token, and still far from the planning tokens.
    assert weight[0, 4] - 1 < 0.25 * (weight[0, 2] - 1)


def test_worked_pooling():
    half = sepa_pool(S, PLAN, ALL, 0.5)
    close(half, [0.24375, 0.29375, 1.8, 0.19375, 0.59375, 0.24375, 2.1, 0.29375, 0.19375, 0.24375], 1e-12)
    assert float(half.mean()) == pytest.approx(0.62)
    close(gtpo_weights(half, ALL), POOLED)
    whole = sepa_pool(S, PLAN, ALL, 1.0)
    close(whole, torch.where(PLAN, S, 0.2875)[0].tolist(), 1e-12)
    close(gtpo_weights(whole, ALL), [RAW[t] if PLAN[0, t] else 0.946371 for t in range(10)])
    close(gtpo_weights(sepa_pool(S, PLAN, ALL, 0.0), ALL), RAW)  # lam=0 is plain GTPO, not weight 1


@pytest.mark.parametrize(
    ("h", "expected"),
    [
        ([0, 0, 1e-8], [0.75] * 3),
        ([5e-8] * 3, [0.75] * 3),
        ([2e-7, 0], [0.811364, 0.675]),
        ([0, 0], [0.75] * 2),
    ],
)
def test_worked_rounding_noise_weighs_all_alike(h, expected):
    h = torch.tensor([h], dtype=torch.float64)
    close(0.75 * gtpo_weights(h, torch.ones_like(h)), expected)


def batch(seed=0, rows=8, tokens=11, dtype=torch.float64):
    """Rows with observations in between; row 0 all planning, row 1 no planning, row 2 without a token."""
    generator = torch.Generator().manual_seed(seed)
    h = torch.rand(rows, tokens, generator=generator, dtype=torch.float64) * 3
    h[3, 0] = 70.0
    mask, planning = (torch.rand(2, rows, tokens, generator=generator) < 0.6).unbind()
    planning[0], planning[1], mask[2], mask[3, 0] = True, False, False, True
    return h.to(dtype), planning, mask


OPERATORS = {
    "gtpo": lambda h, planning, mask: gtpo_weights(h, mask, beta=1.5),
    "pool": lambda h, planning, mask: sepa_pool(h, planning, mask, 0.3),
    "amp": lambda h, planning, mask: sepa_amp(h, planning, mask, 0.3),
    "amp_c": lambda h, planning, mask: sepa_amp_c(h, planning, mask, 0.9),
    "hicra": lambda h, planning, mask: hicra(torch.where(mask.bool(), -h, 0.0), planning * mask, 0.4),
}
each_operator = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)


def test_reductions():
    h, planning, mask = batch()
    clamped = torch.where(mask, h, 0.0).clamp(max=50)
    for sepa in (sepa_pool, sepa_amp, sepa_amp_c):
        assert torch.equal(sepa(h, mask, mask, 0.6), clamped)  # no execution token
        assert torch.equal(sepa(h, planning, mask, -3.0), clamped)
        assert torch.equal(sepa(h, planning, mask, 9.0), sepa(h, planning, mask, 1.0))
    pooled = gtpo_weights(sepa_pool(h, planning, mask, 1.0), mask)
    for b in range(len(h)):
        own = pooled[b][mask[b] & ~planning[b]]
        assert (own == own[:1]).all()  # lam=1: one weight for all execution tokens of a row


@each_operator
@pytest.mark.parametrize("garbage", [NAN, math.inf, -math.inf])
def test_what_stands_outside_the_mask_is_not_read(operator, garbage):
    h, planning, mask = batch(dtype=torch.float32)
    ours = operator(torch.where(mask, h, garbage), planning | ~mask, mask.long())
    assert torch.equal(ours, operator(h, planning & mask, mask)) and ours.dtype == torch.float32


@pytest.mark.parametrize("bad", [-0.1, math.inf, NAN])
def test_strengths_out_of_range(bad):
    for call in (lambda: gtpo_weights(S, ALL, beta=bad), lambda: hicra(S, PLAN, bad)):
        with pytest.raises(ValueError, match=rf"(beta|alpha)={bad}: expected a number at least 0"):
            call()
    for sepa in (sepa_pool, sepa_amp, sepa_amp_c):
        if not math.isfinite(bad):
            with pytest.raises(ValueError, match=f"lam={bad}; expected a finite number"):
                sepa(S, PLAN, ALL, bad)


def test_shapes_and_masks():
    calls = {
        "mask_B_T": [lambda x: gtpo_weights(S, x), lambda x: sepa_pool(S, PLAN, x, 0.5)],
        "planning_B_T": [lambda x: hicra(S, x), lambda x: sepa_amp(S, x, ALL, 0.5)],
    }
    for name, call in ((name, call) for name, pair in calls.items() for call in pair):
        with pytest.raises(ValueError, match=rf"{name} has shape \(1, 9\); expected \(1, 10\)"):
            call(ALL[:, 1:])
        with pytest.raises(ValueError, match=f"{name} is not a mask: row 0"):
            call(S)
