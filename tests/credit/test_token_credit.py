"""From one advantage per turn to one per token: every transform against a loop, and against the simpler ones."""

import pytest
import torch

from verl_credit.credit.token.token_credit import token_credit
from verl_credit.credit.token.token_transforms import TRANSFORMS, TokenTransform, token_weights

OPTIONS = dict(sepa_lambda=0.4, gtpo_beta=0.7, hicra_alpha=0.3, entropy_mask_rho=0.35)
STRONG = dict(sepa_lambda=1.0, gtpo_beta=4.0, hicra_alpha=0.9, entropy_mask_rho=0.01)
POOLED = ("gtpo_sepa", "gtpo_sepa_hicra", "gtpo_sepa_amp", "gtpo_sepa_amp_c")


def batch(seed=0, rows=8, turns=3, width=4):
    """Turns of own tokens with observations in between. Row 2 does not count, row 3 has one uncertainty past the bound,
    row 4 is all planning, row 5 has no planning."""
    generator = torch.Generator().manual_seed(seed)
    own = torch.randint(1, width + 1, (rows, turns, 1), generator=generator)
    mask = (torch.arange(width + 1) < own).flatten(1)
    mask[2] = False
    turn = torch.randn(rows, turns, generator=generator, dtype=torch.float64)
    advantage = torch.where(mask, turn.repeat_interleave(width + 1, dim=1), 0.0)
    h = torch.rand(mask.shape, generator=generator, dtype=torch.float64) * 2
    h[3, 0] = 70.0
    planning = torch.rand(mask.shape, generator=generator) < 0.3
    planning[4], planning[5] = True, False
    group = torch.arange(rows) // 4 * 9
    return dict(
        turn_advantage_B_T=advantage, mask_B_T=mask, uncertainty_B_T=h, planning_B_T=planning, group_B=group
    )


def changed(tables, function):
    return {name: function(name, tensor) for name, tensor in tables.items()}


def variance(values):
    mean = sum(values) / max(len(values), 1)
    return mean, sum((x - mean) ** 2 for x in values) / max(len(values), 1)


def loop(mode, tables, lam, beta, alpha, rho):
    """(advantage, weight, stats) by the definitions, token by token."""
    advantage, mask, h, planning, group = (tensor.tolist() for tensor in tables.values())
    rows, tokens = range(len(h)), range(len(h[0]))
    own = [[t for t in tokens if mask[b][t]] for b in rows]
    bound = [[min(x, 50.0) for x in row] for row in h]
    pooled = [list(row) for row in bound]
    weight, out = [[0.0] * len(h[0]) for _ in rows], [[0.0] * len(h[0]) for _ in rows]
    for b in rows:
        execution = [t for t in own[b] if not planning[b][t]]
        mean = sum(bound[b][t] for t in execution) / max(len(execution), 1)
        for t in execution:
            if mode in ("gtpo_sepa", "gtpo_sepa_hicra"):
                pooled[b][t] = lam * mean + (1 - lam) * bound[b][t]
            elif "amp" in mode:
                pooled[b][t] = (1 + lam) * bound[b][t] - lam * mean
                pooled[b][t] = max(pooled[b][t], 0.0) if mode.endswith("_c") else pooled[b][t]
        used = [min(x, 50.0) for x in pooled[b]]
        mean = sum(used[t] for t in own[b]) / max(len(own[b]), 1)
        ranked = sorted((h[c][t] for c in rows for t in own[c] if group[c] == group[b]), reverse=True)
        for t in own[b]:
            w = 1.0 if mode in ("none", "hicra") else max(0.0, 1 + beta * (used[t] / (mean + 1e-8) - 1))
            if mode == "entropy_mask" and h[b][t] < ranked[max(1, int(len(ranked) * rho)) - 1]:
                w = 0.0
            a = advantage[b][t] * w
            if mode.endswith("hicra") and planning[b][t]:
                a += alpha * abs(a)
            weight[b][t], out[b][t] = w, a
    stats = {}
    for prefix, values in (("", h), ("post_", pooled if mode in POOLED else h)):
        for kind, wanted in (("exec", False), ("plan", True)):
            of_kind = [values[b][t] for b in rows for t in own[b] if planning[b][t] == wanted]
            names = (f"{prefix}{kind}_entropy_{x}" for x in ("mean", "var", "count"))
            stats |= dict(zip(names, (*variance(of_kind), len(of_kind)), strict=True))
    return torch.tensor(out).double(), torch.tensor(weight).double(), stats


each_mode = pytest.mark.parametrize("mode", TRANSFORMS)
each_seed = pytest.mark.parametrize("seed", range(3))


@each_mode
@each_seed
@pytest.mark.parametrize("options", [OPTIONS, STRONG], ids=["usual", "strong"])
def test_every_transform_is_its_definition(mode, seed, options):
    tables = batch(seed)
    credit = token_credit(**tables, transform_mode=mode, **options)
    advantage, weight, stats = loop(mode, tables, *options.values())
    torch.testing.assert_close(credit.weight_B_T, weight, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(credit.advantage_B_T, advantage, rtol=1e-6, atol=1e-7)
    assert credit.stats == pytest.approx(stats, rel=1e-9)


def test_the_published_modes_and_the_three_stage_one():
    assert set(TRANSFORMS) == {"none", "hicra", "gtpo", "gtpo_hicra", "entropy_mask", *POOLED}
    assert {name for name, each in TRANSFORMS.items() if each.uses_sepa_controller} == set(POOLED)
    assert {name for name, each in TRANSFORMS.items() if each.needs_planning} == {
        "hicra",
        "gtpo_hicra",
        *POOLED,
    }


@each_seed
def test_reductions(seed):
    tables = batch(seed)
    turn, mask = tables["turn_advantage_B_T"], tables["mask_B_T"]

    def of(mode, **options):
        return token_credit(**tables, transform_mode=mode, **options).advantage_B_T

    assert torch.equal(of("none"), turn)
    assert torch.equal(of("gtpo", gtpo_beta=0.0), turn)
    assert torch.equal(of("hicra", hicra_alpha=0.0), turn)
    assert torch.equal(of("hicra"), of("gtpo_hicra", gtpo_beta=0.0))
    assert torch.equal(of("gtpo_hicra", hicra_alpha=0.0), of("gtpo"))
    assert torch.equal(of("gtpo_sepa_hicra", hicra_alpha=0.0), of("gtpo_sepa"))
    assert torch.equal(of("gtpo_sepa_hicra", sepa_lambda=0.0), of("gtpo_hicra"))
    for mode in ("gtpo_sepa", "gtpo_sepa_amp", "gtpo_sepa_amp_c"):
        assert torch.equal(of(mode, sepa_lambda=0.0), of("gtpo"))
    for rho in (0.0, 1.0):
        assert torch.equal(of("entropy_mask", entropy_mask_rho=rho), of("gtpo"))
    pure = of("entropy_mask", gtpo_beta=0.0)
    assert set((pure[mask] / turn[mask]).tolist()) == {0.0, 1.0}


@each_mode
def test_a_batch_without_rows(mode):
    tables = changed(batch(2), lambda name, x: x[:0])
    assert token_credit(**tables, transform_mode=mode, **OPTIONS).advantage_B_T.shape == (0, 15)


def test_without_a_planning_mask_every_token_counts_as_execution():
    tables = batch()
    tables["planning_B_T"] = None
    stats = token_credit(**tables, transform_mode="gtpo").stats
    assert stats["exec_entropy_count"] == tables["mask_B_T"].sum() and stats["plan_entropy_count"] == 0
    tables["uncertainty_B_T"] = None
    bare = token_credit(**tables)
    assert bare.stats == {} and torch.equal(bare.weight_B_T, tables["mask_B_T"].double())


def test_what_a_mode_needs():
    for mode, name in [
        ("gtpo", "uncertainty_B_T"),
        ("hicra", "planning_B_T"),
        ("gtpo_hicra", "planning_B_T"),
        ("entropy_mask", "group_B"),
    ]:
        with pytest.raises(ValueError, match=f"transform_mode='{mode}' needs {name}, which is None"):
            token_credit(**(batch() | {name: None}), transform_mode=mode)
    with pytest.raises(ValueError, match="transform_mode='gtpo_hicr' .*did you mean 'gtpo_hicra'"):
        token_credit(**batch(), transform_mode="gtpo_hicr")
    for name in ("mask_B_T", "uncertainty_B_T", "planning_B_T"):
        tables = batch()
        with pytest.raises(ValueError, match=rf"{name} has shape \(8, 14\); expected \(8, 15\)"):
            token_credit(**(tables | {name: tables[name][:, 1:]}))


def test_weights_of_a_transform_put_together_by_hand():
    """The mask reads the uncertainties before pooling, the weights those after it."""
    _, mask, h, planning, group = batch(4).values()
    both = TokenTransform(pool=TRANSFORMS["gtpo_sepa"].pool, weighted=True, masked=True)
    given = dict(planning_B_T=planning, group_B=group, sepa_lambda=1.0, entropy_mask_rho=0.3)
    weight, pooled = token_weights(both, h, mask, **given)
    kept, raw = token_weights(TokenTransform(masked=True), h, mask, **given)
    weighed, again = token_weights(TRANSFORMS["gtpo_sepa"], h, mask, **given)
    assert torch.equal(weight, kept * weighed) and torch.equal(pooled, again) and torch.equal(raw, h)


@pytest.mark.parametrize("mode", TRANSFORMS)
def test_half_precision_advantages_come_back_in_float32(mode):
    advantage = torch.tensor([[0.5, -1.25, 1.0]], dtype=torch.bfloat16)
    mask = torch.ones(1, 3, dtype=torch.bool)
    given = {
        "uncertainty_B_T": torch.tensor([[0.1, 1.0, 2.0]]),
        "planning_B_T": mask,
        "group_B": torch.tensor([0]),
    }
    ours = token_credit(advantage, mask, transform_mode=mode, **given).advantage_B_T
    exact = token_credit(advantage.double(), mask, transform_mode=mode, **given).advantage_B_T
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["turn_advantage_B_T", "uncertainty_B_T"])
def test_numbers_that_are_not_finite_are_refused_by_row(name):
    good = torch.ones(3, 2)
    given = {"turn_advantage_B_T": good, "uncertainty_B_T": good, "mask_B_T": good.bool()}
    bad = good.clone()
    bad[1, 1] = float("inf")
    with pytest.raises(ValueError, match=f"{name} row 1 is not finite on a policy token"):
        token_credit(**(given | {name: bad}), transform_mode="gtpo")
    given["mask_B_T"] = given["mask_B_T"] & bad.isfinite()
    assert token_credit(**(given | {name: bad}), transform_mode="gtpo").advantage_B_T.isfinite().all()
