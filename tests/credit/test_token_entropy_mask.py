"""Credit for the most uncertain tokens of a prompt, and the statistics of execution and planning tokens."""

import math

import pytest
import torch

from verl_credit.credit.token.gtpo import entropy_mask
from verl_credit.credit.token.token_credit import entropy_stats

NAN = math.nan
RHOS = [0.0, 0.01, 0.2, 0.29, 0.5, 0.99, 1.0, -1.0, 3.0]


def batch(seed=0, rows=10, tokens=12, dtype=torch.float64):
    """Uncertainties with many ties, observations in between, prompts of unequal size; row 0 without a token."""
    generator = torch.Generator().manual_seed(seed)
    h = torch.randint(0, 9, (rows, tokens), generator=generator) / 4
    mask, planning = (torch.rand(2, rows, tokens, generator=generator) < 0.6).unbind()
    mask[0] = False
    group = torch.randint(0, 4, (rows,), generator=generator) * 7 - 3
    return h.to(dtype), planning, mask, group


def loop_mask(h, mask, group, rho):
    out = torch.zeros_like(h)
    for g in set(group.tolist()):
        own = [(b, t) for b, t in mask.nonzero().tolist() if group[b] == g]
        ranked = sorted((float(h[b, t]) for b, t in own), reverse=True)
        for b, t in own:
            kept = not 0 < rho < 1 or float(h[b, t]) >= ranked[max(1, int(len(ranked) * rho)) - 1]
            out[b, t] = float(kept)
    return out


def loop_stats(h, planning, mask):
    stats = {}
    for name, wanted in (("exec", False), ("plan", True)):
        own = [float(h[b, t]) for b, t in mask.nonzero().tolist() if bool(planning[b, t]) == wanted]
        n = max(len(own), 1)
        mean = math.fsum(own) / n
        var = math.fsum((x - mean) ** 2 for x in own) / n
        stats |= {f"{name}_mean": mean, f"{name}_var": var, f"{name}_count": float(len(own))}
    return stats


def floats(stats):
    return {name: float(value) for name, value in stats.items()}


each_seed = pytest.mark.parametrize("seed", range(4))
each_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])


@each_seed
@pytest.mark.parametrize("rho", RHOS)
def test_mask_is_the_definition(seed, rho):
    h, _, mask, group = batch(seed)
    assert torch.equal(entropy_mask(h, mask, group, rho=rho), loop_mask(h, mask, group, rho))


@pytest.mark.parametrize(
    ("rho", "kept"),
    [
        (0.05, [0, 0, 0, 0, 1]),  # never fewer than one
        (0.2, [0, 0, 0, 0, 1]),
        (0.39, [0, 0, 0, 0, 1]),  # int(5 * 0.39) = 1
        (0.4, [0, 1, 1, 0, 1]),  # the second largest, and its tie
        (0.8, [1, 1, 1, 0, 1]),
        (1.0, [1, 1, 1, 1, 1]),
        (0.0, [1, 1, 1, 1, 1]),
    ],
)
def test_ranks_and_ties(rho, kept):
    h = torch.tensor([[2.0, 3.0, 3.0, 1.0, 5.0]])
    assert entropy_mask(h, torch.ones(1, 5), torch.tensor([0]), rho=rho)[0].tolist() == kept


def test_a_share_is_counted_as_python_counts_it():
    """int(100 * 0.29) is 28, for 100 * 0.29 is 28.999...; float32 arithmetic would keep 29."""
    h = torch.arange(100.0).view(4, 25)
    assert entropy_mask(h, h >= 0, torch.zeros(4).long(), rho=0.29).sum() == int(100 * 0.29) == 28


@each_seed
def test_mask_ignores_what_is_outside_and_commutes_with_rows(seed):
    h, _, mask, group = batch(seed)
    ours = entropy_mask(h, mask, group, rho=0.3)
    for garbage in (NAN, math.inf, 1e30):
        assert torch.equal(entropy_mask(torch.where(mask, h, garbage), mask, group, rho=0.3), ours)
    pad = torch.nn.functional.pad
    wide = entropy_mask(pad(h, (0, 3), value=NAN), pad(mask, (0, 3)), group, rho=0.3)
    assert torch.equal(wide, pad(ours, (0, 3)))
    order = torch.randperm(10, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(entropy_mask(h[order], mask[order], group[order], rho=0.3), ours[order])
    assert torch.equal(entropy_mask(h, mask.long(), group, rho=0.3), ours)


@each_dtype
def test_dtypes(dtype):
    h, planning, mask, group = batch(2, dtype=dtype)  # quarters: exact in every dtype
    ours = entropy_mask(h, mask, group, rho=0.3)
    assert ours.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.equal(ours.double(), entropy_mask(h.double(), mask, group, rho=0.3))
    stats = entropy_stats(h, planning, mask)
    assert floats(stats) == floats(entropy_stats(h.double(), planning, mask))
    assert {(value.dtype, value.shape) for value in stats.values()} == {(torch.float64, ())}


def test_nothing_to_rank():
    h, planning, mask, group = batch()
    assert not entropy_mask(h, mask & False, group, rho=0.2).any()
    assert entropy_mask(h[:0], mask[:0], group[:0], rho=0.2).shape == (0, 12)
    assert entropy_mask(h[:, :0], mask[:, :0], group, rho=0.2).shape == (10, 0)
    assert set(floats(entropy_stats(h, planning, mask & False)).values()) == {0.0}
    assert set(floats(entropy_stats(h[:0], planning[:0], mask[:0])).values()) == {0.0}


@each_seed
def test_stats_are_the_definition(seed):
    h, planning, mask, _ = batch(seed)
    ours = floats(entropy_stats(h, planning, mask))
    assert list(ours) == ["exec_mean", "exec_var", "exec_count", "plan_mean", "plan_var", "plan_count"]
    assert ours == pytest.approx(loop_stats(h, planning, mask), rel=1e-12)
    assert ours["exec_count"] + ours["plan_count"] == mask.sum()


def test_stats_hold_a_small_spread_on_a_large_mean():
    h = 1e6 + torch.tensor([[0.0, 0.001]], dtype=torch.float64).repeat(50, 1)
    stats = floats(entropy_stats(h, torch.zeros_like(h), torch.ones_like(h)))
    assert stats["exec_var"] == pytest.approx(2.5e-7, rel=1e-5)


@each_seed
def test_stats_ignore_what_is_outside_and_the_order_of_rows(seed):
    h, planning, mask, _ = batch(seed)
    ours = floats(entropy_stats(h, planning, mask))
    assert floats(entropy_stats(torch.where(mask, h, NAN), planning | ~mask, mask)) == ours
    order = torch.randperm(10, generator=torch.Generator().manual_seed(seed))
    assert floats(entropy_stats(h[order], planning[order], mask[order])) == pytest.approx(ours, rel=1e-12)
    wide = [torch.nn.functional.pad(x, (0, 3)) for x in (h, planning, mask)]
    assert floats(entropy_stats(*wide)) == pytest.approx(ours, rel=1e-12)


def test_arguments():
    h, planning, mask, group = batch()
    for rho in (NAN, math.inf):
        with pytest.raises(ValueError, match=f"rho={rho}; expected a share from 0 to 1"):
            entropy_mask(h, mask, group, rho=rho)
    with pytest.raises(ValueError, match=r"mask_B_T has shape \(10, 11\); expected \(10, 12\)"):
        entropy_mask(h, mask[:, 1:], group, rho=0.2)
    with pytest.raises(ValueError, match=r"group_B has shape \(9,\); expected \(10,\)"):
        entropy_mask(h, mask, group[1:], rho=0.2)
    with pytest.raises(TypeError, match=r"group_B has dtype torch.float32; group ids are integers"):
        entropy_mask(h, mask, group.float(), rho=0.2)
    with pytest.raises(ValueError, match="mask_B_T is not a mask: row 1"):
        entropy_mask(h, mask.long() * 2, group, rho=0.2)
    with pytest.raises(ValueError, match=r"planning_B_T has shape \(9, 12\); expected \(10, 12\)"):
        entropy_stats(h, planning[1:], mask)
    with pytest.raises(ValueError, match="planning_B_T is not a mask: row 0 holds values other than 0 and 1"):
        entropy_stats(h, planning + 0.5, mask)


def test_statistics_stay_on_the_device_of_their_tokens():
    h, mask = torch.zeros(2, 3, device="meta"), torch.ones(2, 3, dtype=torch.bool, device="meta")
    assert {value.device.type for value in entropy_stats(h, mask, mask).values()} == {"meta"}
