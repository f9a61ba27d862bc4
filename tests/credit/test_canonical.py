"""GTPO and GRPO-S as their paper defines them, against a loop over prompts, positions and tokens."""

import math

import pytest
import torch

from verl_credit.credit import grpo_s, gtpo_canonical

POPULATIONS = ("all", "polarity", "joint")
NAN = float("nan")
each_population = pytest.mark.parametrize("population", POPULATIONS)
each_seed = pytest.mark.parametrize("seed", range(4))

# Four completions of one prompt, lengths 3, 2, 3, 2; the first two are rewarded.
ENTROPY = torch.tensor([[2, 4, 1], [3, 1, NAN], [4, 0.5, 3], [0.5, 4, NAN]], dtype=torch.float64)
MASK = ~ENTROPY.isnan()
OUTCOME, PROMPT = torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([6, 6, 6, 6])
WORKED = {  # token by token
    "polarity": [-0.5, 1.5, 0, 0.5, -1.5, 1.118, -1.118, 0, -1.118, 1.118],
    "all": [1.9584, 2.1037, 1.9947, 2.0310, 1.8858, -1.8539, -2.1356, -1.9947, -2.1356, -1.8539],
    "joint": [0.9805, 1.0531, 0.9987, 1.0168, 0.9442, -0.9281, -1.0693, -0.9987, -1.0693, -0.9281],
}


def batch(seed, rows=18, width=9, groups=4):
    """Prompts in no order, observations between policy tokens, rows that do not count, NaN where masked."""
    generator = torch.Generator().manual_seed(seed)
    outcome_B = torch.tensor([0.5, 0.6, 1.0, -0.3]).double()[
        torch.randint(0, 4, (rows,), generator=generator)
    ]
    group_B = torch.randint(0, groups, (rows,), generator=generator) * 5 - 8
    mask_B_T = torch.rand(rows, width, generator=generator) < 0.7
    entropy_B_T = torch.rand(rows, width, generator=generator).double() * 3 + 0.01
    valid_B = torch.rand(rows, generator=generator) < 0.85
    return outcome_B, torch.where(mask_B_T, entropy_B_T, NAN), mask_B_T, group_B, valid_B


def apply(function, tables, **options):
    outcome_B, entropy_B_T, mask_B_T, group_B, valid_B = tables
    return function(outcome_B, entropy_B_T, mask_B_T, group_B, row_valid_B=valid_B, **options)


def mixed_prompts(outcome_B, group_B, valid_B):
    """(rewarded rows, other rows) of every prompt that has both."""
    for group in sorted(set(group_B[valid_B].tolist())):
        rows = [row for row in range(len(group_B)) if valid_B[row] and group_B[row] == group]
        sides = [r for r in rows if outcome_B[r] > 0.5], [r for r in rows if not outcome_B[r] > 0.5]
        if all(sides):
            yield sides


def z(values, ddof=0, eps=1e-8):
    if len(values) < 2:
        return [0.0] * len(values)
    mean = math.fsum(values) / len(values)
    std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - ddof))
    return [(v - mean) / (std + eps) for v in values]


def loop_gtpo(outcome_B, entropy_B_T, mask_B_T, group_B, valid_B, population, alpha_2=0.1):
    result = [[0.0] * entropy_B_T.shape[1] for _ in outcome_B]
    for sides in mixed_prompts(outcome_B, group_B, valid_B):
        shaped = [{}, {}]  # (row, position among the row's policy tokens) -> shaped reward
        column = {}
        for side, rows in enumerate(sides):
            own = {row: mask_B_T[row].nonzero().flatten().tolist() for row in rows}
            for row in rows:
                for place, t in enumerate(own[row]):
                    column[row, place] = t
                    there = [other for other in rows if len(own[other]) > place]
                    h = [float(entropy_B_T[other, own[other][place]]) for other in there]
                    share = h if side == 0 else [1 / value for value in h]
                    part = share[there.index(row)] / sum(share) * len(there)
                    shaped[side][row, place] = (1 if side == 0 else -1) * (1.0 + alpha_2 * part)
        plus, minus = shaped
        pools = {
            "polarity": [plus, minus],
            "joint": [plus | minus],
            "all": [plus | dict.fromkeys(minus, 0.0), minus | dict.fromkeys(plus, 0.0)],
        }[population]
        for pool in pools:
            for (row, place), value in zip(pool, z(list(pool.values())), strict=True):
                result[row][column[row, place]] += value
    return torch.tensor(result, dtype=torch.float64)


def loop_grpo_s(outcome_B, entropy_B_T, mask_B_T, group_B, valid_B, beta_2=0.1, ddof=1):
    result = [0.0] * len(outcome_B)
    for sides in mixed_prompts(outcome_B, group_B, valid_B):
        shaped = {}
        for side, rows in enumerate(sides):
            share = {}
            for row in rows:
                own = entropy_B_T[row][mask_B_T[row]].tolist()
                mean = sum(own) / len(own)
                share[row] = mean if side == 0 else 1 / mean
            for row in rows:
                part = len(rows) * share[row] / sum(share.values())
                shaped[row] = (1 if side == 0 else -1) * (1.0 + beta_2 * part)
        for row, value in zip(shaped, z(list(shaped.values()), ddof, 1e-6), strict=True):
            result[row] = value
    return torch.tensor(result, dtype=torch.float64)


@each_population
def test_worked_example(population):
    got = gtpo_canonical(OUTCOME, ENTROPY, MASK, PROMPT, population=population)
    assert got[MASK].tolist() == pytest.approx(WORKED[population], abs=6e-5)
    assert (got[~MASK] == 0).all()


def test_worked_example_per_trajectory():
    got = grpo_s(OUTCOME, ENTROPY, MASK, PROMPT)
    assert got.tolist() == pytest.approx([0.8721, 0.8600, -0.8619, -0.8702], abs=6e-5)


@pytest.mark.parametrize("outcomes", [[1.0, 0, 0, 0], [1.0, 0, 1.0, 1.0]])
def test_a_trajectory_alone_in_its_polarity_has_nothing_to_standardise_over_own_tokens(outcomes):
    """Its share is its entropy over its entropy, or 1 / H over 1 / H: the same for all of its tokens."""
    outcome_B = torch.tensor(outcomes)
    alone_B = outcome_B == (1.0 if outcome_B.sum() == 1 else 0.0)
    got = gtpo_canonical(outcome_B, ENTROPY.nan_to_num() / 20, MASK, PROMPT, population="polarity")
    assert got[alone_B].abs().max() < 1e-3


@each_population
@each_seed
def test_gtpo_agrees_with_a_loop_over_tokens(population, seed):
    tables = batch(seed)
    got = apply(gtpo_canonical, tables, population=population, alpha_2=0.3)
    if population == "polarity":  # trajectories alone in their polarity have a test above
        sides = [side for both in mixed_prompts(*tables[::3], tables[4]) for side in both]
        got[[rows[0] for rows in sides if len(rows) == 1]] = 0.0
    torch.testing.assert_close(got, loop_gtpo(*tables, population, alpha_2=0.3), rtol=0, atol=1e-5)
    assert got.abs().sum() > 1  # the batch has prompts with both polarities


@each_seed
@pytest.mark.parametrize("ddof", [0, 1])
def test_grpo_s_agrees_with_a_loop_over_trajectories(seed, ddof):
    tables = batch(seed)
    got = apply(grpo_s, tables, beta_2=0.3, ddof=ddof)
    torch.testing.assert_close(got, loop_grpo_s(*tables, beta_2=0.3, ddof=ddof), rtol=0, atol=1e-5)


LAWS = {name: (gtpo_canonical, {"population": name}) for name in POPULATIONS} | {"grpo_s": (grpo_s, {})}
each_function = pytest.mark.parametrize(("function", "options"), LAWS.values(), ids=LAWS)


@each_function
@pytest.mark.parametrize("outcome", [0.0, 0.3, 1.0])
def test_a_prompt_of_one_polarity_and_a_group_of_one_give_exactly_zero(function, options, outcome):
    entropy_B_T = torch.rand(6, 5, generator=torch.Generator().manual_seed(0))
    outcome_B, group_B = torch.tensor([outcome] * 4 + [1.0, 0.0]), torch.tensor([3, 3, 3, 3, 8, 9])
    assert (function(outcome_B, entropy_B_T, torch.ones(6, 5), group_B, **options) == 0).all()
    mixed_B = torch.tensor([1.0, 0, 0, 1, 1, 0])  # entropies of zero give finite numbers
    assert function(mixed_B, 0 * entropy_B_T, torch.ones(6, 5), group_B, **options).isfinite().all()


@each_function
def test_errors_say_which_row_and_what_would_be_right(function, options):
    bad = ENTROPY.clone()
    bad[2, 1] = NAN
    with pytest.raises(ValueError, match="entropy_B_T row 2 .* expected finite numbers >= 0"):
        function(OUTCOME, bad, MASK, PROMPT, **options)
    with pytest.raises(ValueError, match="entropy_B_T row 0 .* expected finite numbers >= 0"):
        function(OUTCOME, -ENTROPY, MASK, PROMPT, **options)
    with pytest.raises(ValueError, match="outcome_B row 1 is not finite; expected finite outcomes"):
        function(torch.tensor([1, NAN, 0, 0]), ENTROPY, MASK, PROMPT, **options)
    with pytest.raises(ValueError, match=r"mask_B_T has shape \(4, 2\); expected \(4, 3\), as entropy_B_T"):
        function(OUTCOME, ENTROPY, MASK[:, :2], PROMPT, **options)
    with pytest.raises(ValueError, match="population='polarities' is not known .did you mean 'polarity'"):
        gtpo_canonical(OUTCOME, ENTROPY, MASK, PROMPT, population="polarities")
