"""The three parts as objects: alone, chained by hand, and against `turn_credit`, which chains them itself."""

import dataclasses
import math
import pickle
import statistics

import pytest
import torch

from verl_credit.credit import (
    FIRST_TURN,
    INFO_GAIN_TYPES,
    AdaptiveTurnClipper,
    InformationGain,
    TurnGroupNormalizer,
    info_gain,
    turn_credit,
)

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NAN = float("nan")
each_seed = pytest.mark.parametrize("seed", range(4))

# Three trajectories of one prompt.
GAIN = torch.tensor([[0.4, 0.2], [-0.1, 0.1], [0.3, NAN]], dtype=torch.float64)
MASK, PROMPT = ~GAIN.isnan(), torch.tensor([5, 5, 5])


def batch(seed, rows=20, turns=4):
    """Gains with NaN where there are none; prompt ids in no order."""
    generator = torch.Generator().manual_seed(seed)
    gain_B_K = torch.randn(rows, turns, generator=generator).double() * 0.2
    mask_B_K = torch.rand(rows, turns, generator=generator) < 0.7
    group_B = torch.randint(0, 4, (rows,), generator=generator) * 13 - 20
    return torch.where(mask_B_K, gain_B_K, NAN), mask_B_K, group_B


def loop_z(gain_B_K, mask_B_K, group_B, norm_by_std=True, ddof=0, variance_floor=1e-8, eps=1e-6):
    z_B_K = torch.zeros_like(gain_B_K)
    for turn in range(gain_B_K.shape[1]):
        for group in set(group_B.tolist()):
            rows = [r for r in range(len(group_B)) if group_B[r] == group and mask_B_K[r, turn]]
            values = [gain_B_K[r, turn].item() for r in rows]
            if len(rows) < 2:
                continue
            variance = statistics.variance(values) if ddof else statistics.pvariance(values)
            divisor = math.sqrt(variance + variance_floor) + eps if norm_by_std else 1.0
            for row, value in zip(rows, values, strict=True):
                z_B_K[row, turn] = (value - statistics.fmean(values)) / divisor
    return z_B_K


@pytest.mark.parametrize("info_gain_type", INFO_GAIN_TYPES)
@pytest.mark.parametrize("first_turn", FIRST_TURN)
def test_information_gain_is_info_gain_with_its_settings_kept(info_gain_type, first_turn):
    generator = torch.Generator().manual_seed(0)
    score_B_K1 = -3 * torch.rand(6, 4, generator=generator).double()
    score_B_K1[2, 1] = NAN
    mask_B_K1 = torch.arange(4) < torch.tensor([4, 3, 4, 2, 1, 4])[:, None]
    part = InformationGain(info_gain_type=info_gain_type, first_turn=first_turn)
    got = part(score_B_K1, mask_B_K1)
    want = info_gain(score_B_K1, mask_B_K1, info_gain_type=info_gain_type, first_turn=first_turn)
    for field in dataclasses.fields(want):
        assert torch.allclose(
            getattr(got, field.name), getattr(want, field.name), rtol=0, atol=0, equal_nan=True
        )
    assert got.failed_gains == (2 if first_turn == "prior" else 1)
    last = math.exp(score_B_K1[0, 3]) - math.exp(score_B_K1[0, 2])
    if info_gain_type == "log_prob_diff":
        last = float(score_B_K1[0, 3] - score_B_K1[0, 2])
    assert got.info_gain_B_K[0, 2].item() == pytest.approx(last, abs=1e-12)


def test_worked_z_scores_and_clip_scales():
    """Turn 0: .4, -.1, .3 against each other; turn 1: .2 and .1, two members, +-1."""
    z_B_K = TurnGroupNormalizer()(GAIN, MASK, PROMPT)
    mean, std = 0.2, statistics.pstdev([0.4, -0.1, 0.3])
    assert z_B_K[:, 0].tolist() == pytest.approx([(v - mean) / std for v in (0.4, -0.1, 0.3)], abs=1e-4)
    assert z_B_K[:, 1].tolist() == pytest.approx([1, -1, 0], abs=1e-4)
    scale_B_K = AdaptiveTurnClipper()(z_B_K)
    assert scale_B_K.flatten().tolist() == pytest.approx(
        [1.1297, 1.1386, 0.8198, 0.8614, 1.0682, 1.0], abs=6e-5
    )


@each_seed
@pytest.mark.parametrize(
    "options", [{}, {"norm_by_std": False}, {"ddof": 1}, {"variance_floor": 0.01, "eps": 0.1}]
)
def test_normalizer_agrees_with_a_loop_over_turns_and_prompts(seed, options):
    tables = batch(seed)
    got = TurnGroupNormalizer(**options)(*tables)
    torch.testing.assert_close(got, loop_z(*tables, **options), rtol=0, atol=1e-12)


def test_normalizer_gives_exactly_zero_without_a_gain_a_spread_or_a_companion():
    gain_B_K = torch.tensor([[0.1, NAN], [0.1, 0.7], [0.1, NAN], [0.9, 0.1]])
    mask_B_K = torch.tensor([[True, False], [True, True], [True, False], [True, True]])
    assert (TurnGroupNormalizer()(gain_B_K, mask_B_K, torch.tensor([1, 1, 1, 2])) == 0).all()


@each_seed
def test_permuting_rows_commutes_bit_for_bit(seed):
    tables = batch(seed)
    order = torch.randperm(len(tables[0]), generator=torch.Generator().manual_seed(seed + 7))
    permuted = TurnGroupNormalizer()(*(table[order] for table in tables))
    assert torch.equal(permuted, TurnGroupNormalizer()(*tables)[order])


@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_are_float64_whatever_comes_in(dtype):
    gain_B_K, mask_B_K, group_B = batch(1)
    gain_B_K = gain_B_K.to(dtype)
    got = TurnGroupNormalizer()(gain_B_K, mask_B_K.long(), group_B)
    assert got.dtype == torch.promote_types(dtype, torch.float32)
    exact = TurnGroupNormalizer()(gain_B_K.double(), mask_B_K, group_B)
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=1e-6)


@each_seed
def test_chained_they_are_the_gains_part_of_turn_credit(seed):
    """Scores -> gains -> z -> clip scales, and alpha sum of z / sqrt(n), as in turn-group-v1d without outcomes."""
    generator = torch.Generator().manual_seed(seed)
    score_B_K1 = -2 * torch.rand(12, 4, generator=generator).double()
    n_contexts_B = torch.randint(1, 5, (12, 1), generator=generator)
    group_B = torch.arange(12) % 3
    gains = InformationGain()(score_B_K1, torch.arange(4) < n_contexts_B)
    has_gain_B_K = gains.turn_mask_B_K
    z_B_K = TurnGroupNormalizer()(gains.info_gain_B_K, has_gain_B_K, group_B)
    scale_B_K = AdaptiveTurnClipper(beta=0.2)(z_B_K)
    credit = turn_credit(
        torch.zeros(12), gains.info_gain_B_K, has_gain_B_K, group_B, clip_beta=0.2, alpha=0.5
    )
    torch.testing.assert_close(credit.clip_scale_B_K, scale_B_K, rtol=0, atol=1e-12)
    to_go_B_K = z_B_K.flip(1).cumsum(1).flip(1)
    n_B_K = has_gain_B_K.double().flip(1).cumsum(1).flip(1).clamp(min=1)
    torch.testing.assert_close(credit.advantage_B_K, 0.5 * to_go_B_K / n_B_K.sqrt(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.99])
def test_clipper_is_odd_around_one_monotone_and_bounded(beta):
    z = torch.tensor([0.0, 0.5, 2.0, 50.0], dtype=torch.float64)
    scale = AdaptiveTurnClipper(beta=beta)(z)
    assert scale.tolist() == pytest.approx([1 + beta * math.tanh(value / 2) for value in z.tolist()])
    torch.testing.assert_close(AdaptiveTurnClipper(beta=beta)(-z), 2 - scale)
    assert scale[0] == 1 and (scale <= 1 + beta).all() and (scale.diff() >= 0).all()


def test_parts_are_values():
    """Frozen, equal by their settings, and they travel."""
    for part in (InformationGain("log_prob_diff"), TurnGroupNormalizer(ddof=1), AdaptiveTurnClipper(0.1)):
        assert pickle.loads(pickle.dumps(part)) == part == dataclasses.replace(part) != type(part)()
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, dataclasses.fields(part)[0].name, 0)


@pytest.mark.parametrize("beta", [-0.1, 1.0, 1.5, NAN])
def test_a_beta_outside_its_range_is_refused(beta):
    with pytest.raises(ValueError, match=f"beta={beta}; expected a number at least 0 and below 1"):
        AdaptiveTurnClipper(beta=beta)


def test_errors_name_the_argument_and_what_would_be_right():
    with pytest.raises(
        ValueError, match=r"turn_mask_B_K has shape \(3, 1\); expected \(3, 2\), as info_gain"
    ):
        TurnGroupNormalizer()(GAIN, MASK[:, :1], PROMPT)
    with pytest.raises(ValueError, match=r"group_B has shape \(2,\); expected \(3,\)"):
        TurnGroupNormalizer()(GAIN, MASK, PROMPT[:2])
    with pytest.raises(ValueError, match="turn_mask_B_K is not a mask: row 1 holds"):
        TurnGroupNormalizer()(GAIN, torch.tensor([[0, 1], [2, 1], [1, 0]]), PROMPT)
    for dtype in (torch.float32, torch.complex64, torch.bool):
        with pytest.raises(TypeError, match=f"group_B has dtype {dtype}; group ids are integers"):
            TurnGroupNormalizer()(GAIN, MASK, PROMPT.to(dtype))
    scores, asked = torch.zeros(2, 3), torch.ones(2, 3)
    with pytest.raises(ValueError, match="info_gain_type='prob_dif' is not known .did you mean 'prob_diff'"):
        InformationGain("prob_dif")(scores, asked)
    with pytest.raises(ValueError, match="score_B_K1 row 1 has a score above 0"):
        InformationGain()(torch.tensor([[-1.0, -1, -1], [-1, 0.5, -1]]), asked)
