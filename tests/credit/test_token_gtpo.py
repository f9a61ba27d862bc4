"""GTPO weights, SEPA's pooling and its variants, HICRA: worked numbers, loops over tokens, laws."""

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


def test_worked_hicra():
    gained = [RAW[t] * (1.2 if PLAN[0, t] else 1) for t in range(10)]
    close(hicra(gtpo_weights(S, ALL), PLAN, 0.2), gained, 1e-6)
    assert gained[2] == pytest.approx(1.428387, abs=1e-6) and gained[6] == pytest.approx(1.486452, abs=1e-6)
    lost = hicra(-gtpo_weights(S, ALL), PLAN)  # 0.2 is the default
    assert lost[0, [2, 6]].tolist() == pytest.approx([-0.952258, -0.990968], abs=1e-6)


def test_worked_floor_breaks_conservation():
    weight = gtpo_weights(S, ALL, beta=2)
    close(weight, [0, 0, 4.806452, 0, 1.903226, 0, 5.774193, 0, 0, 0], 1e-6)
    assert float(weight.sum()) == pytest.approx(12.4839, abs=1e-4)


def test_worked_amplification():
    amplified = [0.1125, 0.3125, 1.8, -0.0875, 1.5125, 0.1125, 2.1, 0.3125, -0.0875, 0.1125]
    close(sepa_amp(S, PLAN, ALL, 1.0), amplified, 1e-12)
    close(sepa_amp_c(S, PLAN, ALL, 1.0), [max(x, 0) for x in amplified], 1e-12)
    floored = gtpo_weights(sepa_amp_c(S, PLAN, ALL, 1.0), ALL)
    assert (floored < gtpo_weights(S, ALL))[PLAN].all()  # the floor raises the row's mean


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


def loop_weights(h, mask, beta):
    out = torch.zeros_like(h)
    for b in range(len(h)):
        own = [t for t in range(h.shape[1]) if mask[b, t]]
        mean = sum(min(float(h[b, t]), 50) for t in own) / max(len(own), 1)
        for t in own:
            ratio = min(float(h[b, t]), 50) / (mean + 1e-8)
            out[b, t] = 1 if mean < 1e-7 else max(0, 1 + beta * (ratio - 1))
    return out


def loop_sepa(h, planning, mask, lam, name):
    out = torch.zeros_like(h)
    for b in range(len(h)):
        own = [t for t in range(h.shape[1]) if mask[b, t]]
        execution = [min(float(h[b, t]), 50) for t in own if not planning[b, t]]
        mean = sum(execution) / max(len(execution), 1)
        for t in own:
            x = min(float(h[b, t]), 50)
            if not planning[b, t]:
                x = lam * mean + (1 - lam) * x if name == "sepa_pool" else (1 + lam) * x - lam * mean
            out[b, t] = max(x, 0) if name == "sepa_amp_c" else x
    return out


each_seed = pytest.mark.parametrize("seed", range(3))
each_sepa = pytest.mark.parametrize("sepa", [sepa_pool, sepa_amp, sepa_amp_c], ids=lambda f: f.__name__)
OPERATORS = {
    "gtpo": lambda h, planning, mask: gtpo_weights(h, mask, beta=1.5),
    "pool": lambda h, planning, mask: sepa_pool(h, planning, mask, 0.3),
    "amp": lambda h, planning, mask: sepa_amp(h, planning, mask, 0.3),
    "amp_c": lambda h, planning, mask: sepa_amp_c(h, planning, mask, 0.9),
    "hicra": lambda h, planning, mask: hicra(torch.where(mask.bool(), -h, 0.0), planning * mask, 0.4),
}
each_operator = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)


@each_seed
@pytest.mark.parametrize("beta", [0.0, 0.1, 1.0, 4.0])
def test_weights_are_the_definition(seed, beta):
    h, _, mask = batch(seed)
    torch.testing.assert_close(gtpo_weights(h, mask, beta=beta), loop_weights(h, mask, beta))


@each_seed
@each_sepa
@pytest.mark.parametrize("lam", [0.0, 0.4, 1.0])
def test_sepa_is_the_definition(sepa, seed, lam):
    h, planning, mask = batch(seed)
    torch.testing.assert_close(sepa(h, planning, mask, lam), loop_sepa(h, planning, mask, lam, sepa.__name__))


@each_seed
def test_hicra_is_the_definition(seed):
    h, planning, _ = batch(seed)
    advantage = h - 1.5
    pairs = zip(advantage.flatten().tolist(), planning.flatten().tolist(), strict=True)
    expected = [a + 0.3 * abs(a) if p else a for a, p in pairs]
    close(hicra(advantage, planning, 0.3).view(1, -1), expected, 1e-15)
    assert torch.equal(hicra(advantage, planning, 0.9).sign(), advantage.sign())  # alpha < 1 flips no sign


@each_seed
@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_weights_of_a_row_sum_to_its_tokens(seed, beta):
    h, _, mask = batch(seed)
    weight = gtpo_weights(h, mask, beta=beta)
    torch.testing.assert_close(weight.sum(dim=1), mask.sum(dim=1).double(), rtol=1e-6, atol=0)
    assert (weight[mask] >= 1 - beta).all() and (weight[~mask] == 0).all()


@each_seed
@pytest.mark.parametrize("sepa", [sepa_pool, sepa_amp], ids=lambda f: f.__name__)
def test_sepa_preserves_row_means_so_planning_weights_stay(sepa, seed):
    h, planning, mask = batch(seed)
    ours = sepa(h, planning, mask, 0.7)
    torch.testing.assert_close(ours.sum(dim=1), torch.where(mask, h, 0.0).clamp(max=50).sum(dim=1))
    h = h.clamp(max=5)  # amplified past 50, a token meets the bound of `gtpo_weights` (the next test)
    before, after = gtpo_weights(h, mask), gtpo_weights(sepa(h, planning, mask, 0.7), mask)
    torch.testing.assert_close(after[planning], before[planning], rtol=1e-12, atol=0)


def test_amplified_past_the_bound_a_row_loses_mean_and_planning_weights_grow():
    h, planning = torch.tensor([[40.0, 0.0, 1.0]]), torch.tensor([[0, 0, 1]])
    amplified = sepa_amp(h, planning, torch.ones(1, 3), 1.0)
    assert amplified.tolist() == [[60.0, -20.0, 1.0]]
    assert gtpo_weights(amplified, torch.ones(1, 3))[0, 2] > gtpo_weights(h, torch.ones(1, 3))[0, 2]


def test_reductions():
    h, planning, mask = batch()
    clamped = torch.where(mask, h, 0.0).clamp(max=50)
    assert torch.equal(gtpo_weights(h, mask, beta=0), mask.double())
    assert torch.equal(hicra(h, planning, 0.0), h) and torch.equal(hicra(h, planning & False), h)
    for sepa in (sepa_pool, sepa_amp, sepa_amp_c):
        assert torch.equal(sepa(h, planning, mask, 0.0), clamped)
        assert torch.equal(sepa(h, mask, mask, 0.6), clamped)  # no execution token
        assert torch.equal(sepa(h, planning, mask, -3.0), clamped)
        assert torch.equal(sepa(h, planning, mask, 9.0), sepa(h, planning, mask, 1.0))
    pooled = gtpo_weights(sepa_pool(h, planning, mask, 1.0), mask)
    for b in range(len(h)):
        own = pooled[b][mask[b] & ~planning[b]]
        assert (own == own[:1]).all()  # lam=1: one weight for all execution tokens of a row


@each_operator
@each_seed
def test_garbage_outside_the_mask_does_not_leak(operator, seed):
    h, planning, mask = batch(seed)
    for garbage in (NAN, math.inf, -math.inf):
        dirty = torch.where(mask, h, garbage)
        assert torch.equal(operator(dirty, planning, mask), operator(h, planning, mask))
    assert torch.equal(operator(h, planning | ~mask, mask), operator(h, planning & mask, mask))


@each_operator
def test_padding_width_and_row_order_do_not_matter(operator):
    h, planning, mask = batch(4)
    expected = operator(h, planning, mask)
    pad = torch.nn.functional.pad
    wide = operator(pad(h, (0, 5), value=NAN), pad(planning, (0, 5), value=1), pad(mask, (0, 5)))
    torch.testing.assert_close(wide[:, :11], expected, rtol=1e-14, atol=1e-14)
    assert (wide[:, 11:] == 0).all()
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(operator(h[order], planning[order], mask[order]), expected[order])
    assert operator(h[:0], planning[:0], mask[:0]).shape == (0, 11)


@each_operator
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(operator, dtype):
    h, planning, mask = batch(5, dtype=dtype)
    ours, exact = operator(h, planning, mask), operator(h.double(), planning, mask)
    assert ours.dtype == torch.float32 and exact.dtype == torch.float64
    torch.testing.assert_close(ours, exact.float(), rtol=2e-7, atol=1e-12)  # half precision is only read
    assert torch.equal(operator(h, planning.long(), mask.float()), ours)


def test_no_gradient_flows_into_uncertainties():
    h, planning, mask = batch()
    h.requires_grad_()
    assert not gtpo_weights(h, mask).requires_grad and not sepa_pool(h, planning, mask, 0.5).requires_grad


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
