"""Numbers worked out by hand, or by sums written out here in plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from verl_credit.credit.entropy_change import entropy_change
from verl_credit.credit.entropy_gradient import EntropyGradient, Surrogate, Tokens, places, returns_to_go
from verl_credit.credit.entropy_gradient import predicted as predicted_residuals
from verl_credit.study.probe.policy import Sampling, log_prob_and_entropy
from verl_credit.study.probe.prediction import log_log_slope, predict

P = (0.5, 0.3, 0.15, 0.05)
LOGITS = torch.tensor(P, dtype=torch.float64).log()


def table(*rows):
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows], dtype=torch.float64)


def mask(*lengths):
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def test_an_observation_between_two_turns_is_no_place_and_adds_no_entropy():
    written = torch.tensor([[True, False, False, True]])
    returns = returns_to_go(table((1, 7, 7, 0.5)), written)
    assert returns.tolist() == [[1.5, 0, 0, 0.5]]
    assert places(written)[written].tolist() == [0, 1]


@pytest.mark.parametrize("temperature, top_p", [(1, 1), (1, 0.9), (1, 0.4), (0.7, 1), (0.7, 0.9)])
def test_entropy_under_temperature_and_nucleus(temperature, top_p):
    log_q, found = log_prob_and_entropy(LOGITS[None], torch.tensor([0]), Sampling(temperature, top_p))
    powered, kept, mass = [p ** (1 / temperature) for p in P], [], 0.0
    powered = [p / sum(powered) for p in powered]
    for p in powered:  # already in descending order
        kept += [p] if mass < top_p else []
        mass += p
    q = [p / sum(kept) for p in kept]
    assert float(log_q) == pytest.approx(math.log(q[0]), abs=1e-14)
    assert float(found) == pytest.approx(-sum(p * math.log(p) for p in q), abs=1e-14)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature=0.0: expected a number above 0"),
        ({"temperature": math.nan}, "temperature=nan: expected a number above 0"),
        ({"top_p": 0.0}, r"top_p=0.0: expected a number in \(0, 1\]"),
        ({"top_p": 1.5}, r"top_p=1.5: expected a number in \(0, 1\]"),
    ],
)
def test_impossible_sampling_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


RESIDUAL, WRITTEN = table((0.75, 0.25, 0), (0.2, 0), (1.2,)), mask(3, 2, 1)


def predicted(prompt=(0, 1, 2)):
    return predicted_residuals(RESIDUAL, WRITTEN, torch.tensor(prompt))


def test_the_slope_and_its_standard_error():
    """Prompts with (N, D, F, T): slope = (N - F / T D) / T, its jackknife by leaving each prompt out in turn."""
    n, d, f, t = (1.0, 2.0, 4.0), (0.5, -0.5, 1.5), (3.0, 2.0, 4.0), (2.0, 3.0, 1.0)
    one, zero = torch.ones(3, 1, dtype=torch.float64), torch.zeros(3, 1, dtype=torch.float64)
    n_3, d_3, f_3, t_3 = (torch.tensor(c, dtype=torch.float64) for c in (n, d, f, t))
    gradient = EntropyGradient(
        f_3, t_3, Surrogate(n_3[:, None], zero), Surrogate(d_3[:, None], zero), torch.arange(3)
    )
    found = predict(gradient, Tokens(one, zero))

    def slope(rows):
        mean_n, mean_d, mean_f, mean_t = (sum(c[r] for r in rows) / len(rows) for c in (n, d, f, t))
        return (mean_n - mean_f / mean_t * mean_d) / mean_t

    assert found.slope == pytest.approx(slope([0, 1, 2]), abs=1e-14)
    left_out = [slope([1, 2]), slope([0, 2]), slope([0, 1])]
    mean = sum(left_out) / 3
    assert found.jackknife_se == pytest.approx(
        math.sqrt(2 / 3 * sum((x - mean) ** 2 for x in left_out)), abs=1e-14
    )
    assert found.entropy == 9 / 6
    assert found.at(-2.0) == pytest.approx((-2 * found.slope, 2 * found.jackknife_se))


SPLIT = [(0.1, 0, 0, 0), (-0.05, -0.05, 0, 0, 0, 0), (0.5, -0.5)]
OLD, NEW = [(2.1, 0, 0, 0), (3, 0.1), (1.05, 0)], [(0, 0, 0, 2), (1, 2), (0.5, 0.5)]


def changed(group=(0, 1, 2), shift=0.0):
    before = Tokens(
        torch.zeros(3, 6, dtype=torch.float64), table(*(row + (0,) * (6 - len(row)) for row in OLD))
    )
    ratio = table(*SPLIT)
    ratio[0, 0] += shift
    after = Tokens(ratio, table(*(row + (0,) * (6 - len(row)) for row in NEW)))
    return entropy_change(before, after, mask(4, 6, 2), torch.tensor(group))


def test_the_change_by_importance_sampling_per_token():
    """lw = (.1, -.1, 0), H' = (2, 3, 1), T = (4, 6, 2), H = (2.1, 3.1, 1.05)."""
    found = changed()
    assert found.change == pytest.approx(-0.020833, abs=5e-7)
    assert found.ess == pytest.approx(2.980, abs=5e-4)
    assert found.clipped == 0
    w, h, t, old = (math.exp(0.1), math.exp(-0.1), 1.0), (2, 3, 1), (4, 6, 2), (2.1, 3.1, 1.05)

    def change(rows):
        new = sum(w[i] * h[i] for i in rows) / sum(w[i] * t[i] for i in rows)
        return new - sum(old[i] for i in rows) / sum(t[i] for i in rows)

    left_out = [change([1, 2]), change([0, 2]), change([0, 1])]
    mean = sum(left_out) / 3
    assert found.se == pytest.approx(math.sqrt(2 / 3 * sum((x - mean) ** 2 for x in left_out)), rel=1e-12)


def test_two_rollouts_of_a_prompt_weigh_half_each():
    """Rows 0 and 1 are one prompt: (w0 H0 + w1 H1) / 2 + w2 H2 over the same of w T."""
    w0, w1 = math.exp(0.1), math.exp(-0.1)
    new = ((w0 * 2 + w1 * 3) / 2 + 1) / ((w0 * 4 + w1 * 6) / 2 + 2)
    assert changed(group=(5, 5, 2)).change == pytest.approx(new - (5.2 / 2 + 1.05) / 7, abs=1e-14)


def test_a_weight_beyond_the_limit_is_cut_and_counted():
    far, at_limit = changed(shift=14.9), changed(shift=9.9)
    assert far.change == pytest.approx(at_limit.change, abs=1e-12)
    assert (far.clipped, at_limit.clipped) == (pytest.approx(1 / 3), 0)
    assert far.ess == pytest.approx(1, abs=1e-3)


def test_the_slope_in_logarithms():
    etas = [1e-6, 2e-6, 4e-6, 8e-6]
    assert log_log_slope(etas, [-3 * eta for eta in etas]) == pytest.approx(1)
    assert log_log_slope(etas, [eta**2 for eta in etas]) == pytest.approx(2)
