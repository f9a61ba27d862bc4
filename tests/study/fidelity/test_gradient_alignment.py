"""Statistics of gradients: known cosines, coverage of intervals, what is undefined; known biases in the exact world."""

import math

import numpy as np
import pytest
import torch

from kit.drawn_groups import draw_groups, group_gradients, true_advantages
from verl_credit.study.fidelity.agreements import Measure
from verl_credit.study.fidelity.alignment import (
    Alignment,
    PromptSums,
    along_own,
    draw_batches,
    length_of_batches,
    variance_of_ratio,
)
from verl_credit.study.fidelity.exact.bias import advantages, as_world, cosine, expected_gradient, list_groups
from verl_credit.study.fidelity.exact.operators import gradient, outcome_credit_of, reward, turn_credit_of
from verl_credit.study.fidelity.exact.question import QUESTIONS, list_trajectories
from verl_credit.study.stats import interval, product_of_means, prompts_for, root

PROMPTS, ENTRIES = 30, 20


def sums(first_P_S, second_P_S=None, square_P=None):
    return PromptSums(first_P_S, first_P_S if second_P_S is None else second_P_S, square_P=square_P)


def holds(measure: Measure, value: float) -> bool:
    return measure.low <= value <= measure.high


def test_products_and_their_leave_outs_by_hand():
    x_P_S, y_P_S = np.random.default_rng(0).normal(size=(2, 5, 3))

    def by_hand(rows):
        return np.mean([x_P_S[p] @ y_P_S[q] for p in rows for q in rows if p != q])

    wanted = [by_hand(range(5)), *(by_hand([p for p in range(5) if p != out]) for out in range(5))]
    np.testing.assert_allclose(product_of_means(x_P_S @ y_P_S.T), wanted)
    tokens_P = np.array([3.0, 1, 4, 1, 5])

    def variance(rows):
        x, n = x_P_S[rows], tokens_P[rows]
        return ((x - np.outer(n, x.sum(0) / n.sum())) ** 2).sum() / (len(rows) - 1)

    wanted = [variance(list(range(5))), *(variance([p for p in range(5) if p != out]) for out in range(5))]
    np.testing.assert_allclose(variance_of_ratio(x_P_S @ x_P_S.T, tokens_P), wanted)


def test_the_jackknife_of_a_mean_is_its_standard_error():
    x = np.random.default_rng(1).normal(size=50)
    found = interval(np.array([x.mean(), *((x.sum() - x) / 49)]))
    assert (found.value, found.n) == (pytest.approx(x.mean()), 50)
    assert found.high - found.value == pytest.approx(1.959964 * x.std(ddof=1) / math.sqrt(50))
    assert prompts_for(found) == math.ceil(50 * ((found.high - found.low) / 0.1) ** 2)
    assert interval(np.array([np.nan, 1.0, 2.0])).value is None
    assert interval(np.array([1.0, 1.0, np.nan])) == Measure(1.0, n=2)
    assert prompts_for(Measure(1.0, n=2)) is None


def drawn(random, prompts=PROMPTS):
    """(g, h) [P, S] with a cosine of .8 of their means, and noise that they share: the rollouts are the same."""
    g, h = np.zeros((2, ENTRIES))
    g[:2], h[0] = (0.8, 0.6), 1.0
    shared, own, other = random.normal(size=(3, prompts, ENTRIES))
    return g + 0.4 * shared + 0.4 * own, h + 0.4 * shared + 0.4 * other


def test_the_bias_finds_a_known_cosine_and_its_interval_holds_it():
    random, naive, found = np.random.default_rng(2), [], []
    for _ in range(400):
        g_P_S, h_P_S = drawn(random)
        g, h = g_P_S.mean(0), h_P_S.mean(0)
        naive.append(g @ h / np.linalg.norm(g) / np.linalg.norm(h))
        products = [product_of_means(a @ b.T) for a, b in ((g_P_S, h_P_S), (g_P_S, g_P_S), (h_P_S, h_P_S))]
        found.append(interval(products[0] / root(products[1]) / root(products[2])))
    values = np.array([measure.value for measure in found])
    assert values.mean() == pytest.approx(0.8, abs=0.01)
    assert np.mean(naive) < 0.76  # noise in both lengths
    assert 0.92 < np.mean([holds(measure, 0.8) for measure in found]) < 0.99


def replicated(random, prompts=PROMPTS):
    """Prompts whose own gradients r_p differ; g is biased and noisy, ``near`` less so; h and h' are r and noise."""
    r = random.normal(size=(prompts, ENTRIES)) / 4
    r[:, 0] += 1
    noise = random.normal(size=(4, prompts, ENTRIES))
    g, near = r + 0.8 * noise[0], r + 0.5 * noise[0]
    g[:, 1] += 0.5
    first, second = r + 0.5 * noise[1], r + 0.5 * noise[2]
    return r, g, r + 0.6 * noise[3], sums(first, second, (first * second).sum(1)), near


@pytest.mark.slow
def test_cosines_of_batches_are_those_with_the_true_gradients():
    random, size = np.random.default_rng(3), 8
    own, length = [], []
    for _ in range(3000):
        r, g, *_, near = replicated(random, size)
        r_b, g_b, near_b = r.sum(0), g.sum(0), near.sum(0)
        own.append([g_b @ r_b / np.linalg.norm(g_b), near_b @ r_b / np.linalg.norm(near_b)])
        length.append(r_b @ r_b)
    own = np.mean(own, 0) / math.sqrt(np.mean(length))
    found = []
    for _ in range(100):
        _, g, h, replicate, near = replicated(random)
        alignment = Alignment(sums(h), replicate, np.ones(PROMPTS), sums(g), batch_prompts=size)
        found.append([alignment.of(sums(mode)) for mode in (g, near)])
    for measures, wanted in (
        ([pair[0].own for pair in found], own[0]),
        ([pair[1].own for pair in found], own[1]),
        ([pair[1].own_difference for pair in found], own[1] - own[0]),
    ):
        assert np.mean([m.value for m in measures]) == pytest.approx(wanted, abs=0.02)
        assert np.mean([holds(m, wanted) for m in measures]) > 0.9
    assert found[0][0].own_difference == Measure(0.0, 0.0, 0.0, PROMPTS)
    widths = [[m.high - m.low for m in (pair[0].own, pair[1].own, pair[1].own_difference)] for pair in found]
    first, second, paired = np.mean(widths, 0)
    assert paired < 0.7 * math.hypot(first, second)


@pytest.mark.slow
def test_noise_that_credit_shares_with_the_replicate_does_not_count():
    """True advantages as a mode: the same values are in both, but a half of one meets the other half of the other."""
    random, found = np.random.default_rng(4), []
    for _ in range(50):
        r, _, h, _, _ = replicated(random)
        value_noise = 0.7 * random.normal(size=(2, PROMPTS, ENTRIES))
        first, second = r + value_noise
        replicate = sums(first, second, (first * second).sum(1))
        alignment = Alignment(sums(h), replicate, np.ones(PROMPTS), sums(h), batch_prompts=8)
        shared = sums(*(half + 0.4 * random.normal(size=half.shape) for half in (first, second)))
        g_R_S, r_R_S = (draw_batches(PROMPTS, 8) @ x for x in (shared.both_P_S, r))
        along_R = (g_R_S * r_R_S).sum(1) / np.linalg.norm(g_R_S, axis=1)
        exact = along_R.mean() / math.sqrt((r_R_S**2).sum(1).mean())
        found.append([exact, *(alignment.of(x).own.value for x in (shared, sums(shared.both_P_S)))])
    exact, by_halves, by_all = np.mean(found, 0)
    assert by_halves == pytest.approx(exact, abs=0.02)
    assert by_all > exact + 0.3


def test_signal_to_noise_is_that_of_a_batchs_mean():
    """|mean|^2 = 1 beside a variance of 20 * .25 by each prompt: 30 / 5 for a batch of 30."""
    random, found = np.random.default_rng(5), []
    for _ in range(200):
        g = 0.5 * random.normal(size=(PROMPTS, ENTRIES))
        g[:, 0] += 1
        replicate = sums(g, None, np.ones(PROMPTS))
        alignment = Alignment(sums(g), replicate, np.ones(PROMPTS), sums(g), batch_prompts=PROMPTS)
        found.append(alignment.of(sums(g)).signal_to_noise)
    assert np.mean([m.value for m in found]) == pytest.approx(6, rel=0.03)
    assert 0.9 < np.mean([holds(m, 6) for m in found]) < 0.99


def test_what_has_no_direction_is_undefined_and_never_0():
    random = np.random.default_rng(6)
    _, g, h, replicate, _ = replicated(random)
    nothing = Measure(None, n=PROMPTS)
    alignment = Alignment(sums(h), replicate, np.ones(PROMPTS), sums(g), batch_prompts=8)
    silent = alignment.of(sums(np.zeros((PROMPTS, ENTRIES))))
    assert set(vars(silent).values()) == {nothing}
    opposite = np.repeat(random.normal(size=(PROMPTS // 2, ENTRIES)), 2, axis=0)
    opposite[1::2] *= -1  # sums to 0: the estimate of |E[g]|^2 is negative
    against = alignment.of(sums(opposite))
    assert against.bias == nothing and against.signal_to_noise.value is None
    assert against.signal_to_noise.low < against.signal_to_noise.high < 0
    assert against.own.value is not None
    few = Alignment(sums(h), replicate, np.ones(PROMPTS), sums(g), batch_prompts=PROMPTS - 1).of(sums(g))
    assert few.bias.value is not None and (few.own, few.own_difference) == (nothing,) * 2


def test_every_prompt_is_in_as_many_batches_as_others():
    member_R_P = draw_batches(48, 16)
    assert (member_R_P.sum(1) == 16).all() and len(member_R_P) == 960
    assert (member_R_P.sum(0) == 320).all()
    assert np.array_equal(member_R_P, draw_batches(48, 16)) and len(np.unique(member_R_P, axis=0)) > 900


def test_along_and_its_leave_outs_by_hand():
    g_P_S, h_P_S = np.random.default_rng(7).normal(size=(2, 7, 3))
    member_R_P = draw_batches(7, 3)
    length_R = length_of_batches(g_P_S @ g_P_S.T, member_R_P)
    own = along_own(g_P_S @ h_P_S.T, length_R, member_R_P)
    for batch, member_P in enumerate(member_R_P > 0):
        g = g_P_S[member_P].sum(0)
        for column in range(8):
            kept_P = np.arange(7) != column - 1
            if not kept_P[member_P].all():
                assert np.isnan(own[batch, column])
                continue
            np.testing.assert_allclose(own[batch, column], g @ h_P_S[member_P].sum(0) / np.linalg.norm(g))


def exact_sums(size, groups, seed):
    """Drawn groups of two questions whose gradients stand one after the other: {mode: (sums, exact E[g])}, and of A*."""
    random = torch.Generator().manual_seed(seed)
    credits = outcome_credit_of("rloo"), turn_credit_of("turn-group-v1d", alpha=1.0)
    found, exact, true, true_exact = {c.name: [] for c in credits}, {c.name: [] for c in credits}, [], []
    for question in QUESTIONS.values():
        t = list_trajectories(question)
        logits_D = t.choices.logits_with_stop(0.3)
        world, star_N_K1 = as_world(t, logits_D), true_advantages(t, logits_D)
        group_M_G = draw_groups(t.probability_N(logits_D), groups, size, random)
        every_M_G = list_groups(len(t.outcome_N), size)
        for credit in credits:
            drawn_M_D = group_gradients(advantages(credit, world, group_M_G), group_M_G, t, logits_D)
            found[credit.name].append(drawn_M_D)
            all_of_them = advantages(credit, world, every_M_G)
            exact[credit.name].append(expected_gradient(all_of_them, every_M_G, t, logits_D))
        true.append(group_gradients(star_N_K1[group_M_G], group_M_G, t, logits_D))
        true_exact.append(gradient(reward, t, logits_D, size))
    modes = {name: sums(torch.block_diag(*parts).numpy()) for name, parts in found.items()}
    cosines = {name: cosine(torch.cat(parts), torch.cat(true_exact)) for name, parts in exact.items()}
    return modes, cosines, sums(torch.block_diag(*true).numpy())


def test_in_the_exact_world_rloo_passes_and_v1d_has_its_exact_bias():
    modes, cosines, true = exact_sums(size=4, groups=400, seed=0)
    prompts = len(true.first_P_S)
    replicate = sums(true.first_P_S, None, np.ones(prompts))
    alignment = Alignment(true, replicate, np.ones(prompts), modes["rloo"], batch_prompts=prompts)
    rloo, v1d = (alignment.of(mode).bias for mode in modes.values())
    assert cosines["rloo"] == pytest.approx(1) and cosines["turn-group-v1d"] < 0.9
    assert holds(rloo, 1.0) and rloo.high - rloo.low < 0.1
    assert holds(v1d, cosines["turn-group-v1d"]) and v1d.high < 0.95
    assert alignment.of(true).bias.value == pytest.approx(1, abs=1e-12)
