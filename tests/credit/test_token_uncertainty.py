"""How unsure the policy was of a token: against the definition written as a loop over tokens."""

import math

import pytest
import torch

from verl_credit.credit.token.uncertainty import ALIASES, UNCERTAINTY_KINDS, canonical_kind, uncertainty

INF, NAN = math.inf, math.nan


def oracle(kind, log_prob, entropy):
    if kind == "surprisal":
        return min(-log_prob, 50.0)
    if kind == "predictive_variance":
        p = min(math.exp(max(log_prob, -50.0)), 1.0)
        return p * (1 - p)
    return min(entropy, 50.0)


def batch(seed=0, rows=6, tokens=9, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    log_prob = -torch.rand(rows, tokens, generator=generator, dtype=torch.float64).mul(3).exp() + 1
    entropy = torch.rand(rows, tokens, generator=generator, dtype=torch.float64) * 4
    mask = torch.rand(rows, tokens, generator=generator) < 0.7
    return log_prob.to(dtype), entropy.to(dtype), mask


def measure(kind, log_prob, entropy, mask):
    return uncertainty(kind, log_prob, mask, entropy_B_T=entropy)


def one(kind, value):
    tensor = torch.tensor([[value]], dtype=torch.float64)
    return float(uncertainty(kind, tensor, torch.ones(1, 1), entropy_B_T=tensor))


each_kind = pytest.mark.parametrize("kind", UNCERTAINTY_KINDS)


@each_kind
@pytest.mark.parametrize("seed", range(3))
def test_every_token_is_the_definition(kind, seed):
    log_prob, entropy, mask = batch(seed)
    log_prob[0, 0], entropy[0, 1], mask[0, :2] = -80.0, 71.0, True
    ours = measure(kind, log_prob, entropy, mask)
    for b, t in mask.nonzero().tolist():
        expected = oracle(kind, float(log_prob[b, t]), float(entropy[b, t]))
        assert float(ours[b, t]) == pytest.approx(expected, rel=1e-14)
    assert (ours[~mask] == 0).all()


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("surprisal", -0.25, 0.25),
        ("surprisal", 0.0, 0.0),
        ("surprisal", 0.5, -0.5),  # a log-prob above 0 is the engine's rounding: passed on, not hidden
        ("surprisal", -50.0, 50.0),
        ("surprisal", -1e9, 50.0),
        ("surprisal", -INF, 50.0),
        ("predictive_variance", math.log(0.5), 0.25),
        ("predictive_variance", math.log(0.1), 0.09),
        ("predictive_variance", 0.0, 0.0),
        ("predictive_variance", 0.5, 0.0),
        ("predictive_variance", -INF, math.exp(-50)),
        ("shannon_entropy", math.log(7), math.log(7)),
        ("shannon_entropy", INF, 50.0),
    ],
)
def test_single_values(kind, value, expected):
    assert one(kind, value) == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_every_alias_is_its_kind():
    published = {
        "surprisal": ["token_surprisal", "neg_logprob", "negative_logprob", "nll"],
        "predictive_variance": ["pred_var", "bernoulli_variance"],
        "shannon_entropy": ["shannon", "entropy", "token_entropy"],
    }
    assert sum(map(len, published.values())) == len(ALIASES)
    log_prob, entropy, mask = batch()
    for kind, aliases in published.items():
        assert canonical_kind(kind) == kind
        expected = measure(kind, log_prob, entropy, mask)
        for alias in aliases:
            assert canonical_kind(alias) == kind
            assert torch.equal(measure(alias, log_prob, entropy, mask), expected)
    assert canonical_kind("varentropy") is None


@each_kind
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("garbage", [NAN, INF, -INF])
def test_the_mask_and_the_dtype_are_only_read(kind, dtype, garbage):
    """Half precision is never computed in: the result is the float64 one of the same numbers."""
    log_prob, entropy, mask = batch(2, dtype=dtype)
    exact = measure(kind, log_prob.double(), entropy.double(), mask)
    dirty = [torch.where(mask, tensor, garbage) for tensor in (log_prob, entropy)]
    ours = measure(kind, *dirty, mask.long())
    assert ours.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.equal(ours, exact.to(ours.dtype))
    assert measure(kind, log_prob[:0], entropy[:0], mask[:0]).shape == (0, 9)


def test_surprisal_as_a_weight_is_the_gradient_of_the_entropy():
    """E[-log p grad log p] = grad H, exactly, when all outcomes are enumerated; and no gradient flows into h."""
    logit = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(4)).requires_grad_()
    log_p = logit.log_softmax(dim=0)
    h = uncertainty("surprisal", log_p[None], torch.ones(1, 7))[0]
    assert not h.requires_grad
    weighted = (log_p.exp().detach() * h * log_p).sum()
    entropy = -(log_p.exp() * log_p).sum()
    ours, exact = (torch.autograd.grad(x, logit, retain_graph=True)[0] for x in (weighted, entropy))
    torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-14)


def test_unknown_kinds():
    log_prob, _, mask = batch()
    with pytest.raises(ValueError, match=r"uncertainty_kind='surprisl' .*did you mean 'surprisal'.*shannon"):
        uncertainty("surprisl", log_prob, mask)
    with pytest.raises(ValueError, match="uncertainty_kind='varentropy' .*defined nowhere"):
        uncertainty("varentropy", log_prob, mask)


def test_shapes_and_missing_entropies():
    log_prob, entropy, mask = batch()
    with pytest.raises(ValueError, match="shannon_entropy' needs entropy_B_T"):
        uncertainty("shannon_entropy", log_prob, mask)
    with pytest.raises(ValueError, match=r"mask_B_T has shape \(6, 8\); expected \(6, 9\), as log_prob_B_T"):
        uncertainty("surprisal", log_prob, mask[:, :8])
    with pytest.raises(ValueError, match=r"entropy_B_T has shape \(5, 9\); expected \(6, 9\)"):
        uncertainty("entropy", log_prob, mask, entropy_B_T=entropy[:5])
    mask = mask.long()
    mask[4, 2] = 2
    with pytest.raises(ValueError, match="mask_B_T is not a mask: row 4"):
        uncertainty("surprisal", log_prob, mask)


@pytest.mark.parametrize(
    ("kind", "name", "bad"),
    [
        ("surprisal", "log_prob_B_T", NAN),
        ("surprisal", "log_prob_B_T", INF),
        ("predictive_variance", "log_prob_B_T", NAN),
        ("shannon_entropy", "entropy_B_T", NAN),
        ("shannon_entropy", "entropy_B_T", -INF),
    ],
)
def test_a_policy_token_without_a_number_stops_the_run(kind, name, bad):
    log_prob, entropy, mask = batch()
    mask[3, 5] = True
    (entropy if name == "entropy_B_T" else log_prob)[3, 5] = bad
    with pytest.raises(ValueError, match=f"{name} row 3 holds {bad} on a policy token"):
        measure(kind, log_prob, entropy, mask)
