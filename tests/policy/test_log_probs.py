"""Log-probs and entropies in chunks: against verl's own, against float64, at the borders of chunks and of numbers."""

import math
import subprocess
import sys

import pytest
import torch
from torch.autograd import gradcheck

from verl_credit.policy.log_probs import entropy_from_logits, log_probs_from_logits, token_values

TOKENS, VOCABULARY = 23, 301
CHUNKS = (1, 7, 23, 64)  # 7: a last chunk of 2; 64: more than there are


def drawn(dtype=torch.float32, scale=3.0, tokens=TOKENS, vocabulary=VOCABULARY):
    """(logits, labels, temperatures, weights of the two results)"""
    random = torch.Generator().manual_seed(5)
    logits = torch.randn(tokens, vocabulary, generator=random, dtype=torch.float64) * scale
    labels = torch.randint(0, vocabulary, (tokens,), generator=random)
    temperature = torch.rand(tokens, generator=random) + 0.4
    return logits.to(dtype), labels, temperature, torch.randn(2, tokens, generator=random)


def log_probs_and_entropy(*given, **options):
    return tuple(token_values(*given, **options).values())


def exact(logits, labels, temperature=None):
    """The definition, in float64."""
    z = logits.double() if temperature is None else logits.double() / temperature.double()[:, None]
    log_p = z.log_softmax(-1)
    return log_p.gather(-1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def gradient_of(results, weights, logits):
    return torch.autograd.grad(sum((r * w).sum() for r, w in zip(results, weights, strict=True)), logits)[0]


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("with_temperature", [False, True])
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_fp32_is_verls(scale, chunk, with_temperature):
    """Values and gradients within 1e-6 of verl's loop and of verl's entropy, temperature as its engine applies it.

    A wider spread of logits takes float32's gradients, verl's as much as ours, further than that from float64's.
    """
    from verl.utils.torch_functional import entropy_from_logits_with_chunking, logprobs_from_logits_v2
    from verl.workers.engine.fsdp.transformer_impl import _scale_logits_by_temperature

    logits, labels, temperature, weights = drawn(scale=scale)
    temperature = temperature if with_temperature else None
    theirs, ours = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    scaled = theirs
    if with_temperature:
        scaled = _scale_logits_by_temperature(theirs, temperature[:, None], is_unit_temperature=False)
    expected = logprobs_from_logits_v2(scaled, labels), entropy_from_logits_with_chunking(scaled, 8)
    found = log_probs_and_entropy(ours, labels, temperature, chunk_size=chunk)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    gradients = gradient_of(found, weights, ours), gradient_of(expected, weights, theirs)
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6 if scale == 1 else 5e-5)
    alone = log_probs_from_logits(ours, labels, temperature, chunk_size=chunk)
    torch.testing.assert_close(alone, expected[0].detach(), rtol=0, atol=1e-6)


def test_gradients_of_every_combination_in_float64():
    logits, labels, temperature, _ = drawn(torch.float64, tokens=5, vocabulary=11)
    logits.requires_grad_()
    for t in (None, temperature):
        assert gradcheck(lambda x, t=t: log_probs_from_logits(x, labels[:5], t, chunk_size=2), logits)
        assert gradcheck(lambda x, t=t: entropy_from_logits(x, 2, temperature_T=t), logits)
        assert gradcheck(lambda x, t=t: log_probs_and_entropy(x, labels[:5], t, chunk_size=2), logits)


@pytest.mark.parametrize("inplace", [False, True])
def test_bf16_logits_are_summed_in_float32(inplace):
    """Within 1e-5 of float64 on the same bf16 logits; the gradient, which is bf16, within one rounding."""
    logits, labels, temperature, weights = drawn(torch.bfloat16)
    true = logits.double().requires_grad_()
    expected = exact(true, labels, temperature)
    wanted = gradient_of(expected, weights, true)
    ours = logits.clone().requires_grad_()
    found = log_probs_and_entropy(ours, labels, temperature, inplace_backward=inplace, chunk_size=4)
    assert [value.dtype for value in found] == [torch.float32] * 2
    for value, right in zip(found, expected, strict=True):
        torch.testing.assert_close(value.double(), right, rtol=0, atol=1e-5)
    gradient = gradient_of(found, weights, ours)
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(gradient.double(), wanted, rtol=2**-8, atol=1e-6)


def test_in_place_the_gradient_lies_where_the_logits_were():
    logits, labels, _, weights = drawn()
    expected = gradient_of(
        [log_probs_from_logits(leaf := logits.clone().requires_grad_(), labels)], weights[:1], leaf
    )
    leaf = logits.clone().requires_grad_()
    made = leaf * 1.0
    log_prob = log_probs_from_logits(made, labels, inplace_backward=True, chunk_size=5)
    (log_prob * weights[0]).sum().backward()
    torch.testing.assert_close(leaf.grad, expected, rtol=0, atol=0)
    torch.testing.assert_close(made.detach(), expected, rtol=0, atol=0)


def test_in_place_says_so_where_the_logits_are_still_needed():
    """By a second backward, and by another function of them."""
    logits, labels, _, _ = drawn()
    made = logits.requires_grad_() * 1.0
    total = log_probs_from_logits(made, labels, inplace_backward=True).sum()
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()
    capped = (logits * 0.1).tanh()  # tanh keeps its result for its own backward
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        log_probs_from_logits(capped, labels, inplace_backward=True).sum().backward()


def test_no_tokens():
    logits = torch.zeros(0, VOCABULARY, requires_grad=True)
    log_prob, entropy = log_probs_and_entropy(logits, torch.zeros(0, dtype=torch.long))
    (log_prob.sum() + entropy.sum()).backward()
    assert log_prob.shape == entropy.shape == (0,) and logits.grad.shape == (0, VOCABULARY)


def test_forbidden_tokens():
    """-inf logits: probability 0, nothing added to the entropy, gradient 0; a forbidden label has log-prob -inf."""
    logits, labels, _, weights = drawn(torch.float64)
    logits[:, ::3] = -math.inf
    labels = labels // 3 * 3 + 1  # allowed
    labels[4] = 3
    kept = [v for v in range(VOCABULARY) if v % 3]
    small = torch.tensor([kept.index(v) if v % 3 else 0 for v in labels.tolist()])
    expected = exact(logits[:, kept], small)
    leaf = logits.clone().requires_grad_()
    log_prob, entropy = log_probs_and_entropy(leaf, labels, chunk_size=5)
    assert log_prob[4] == -math.inf
    torch.testing.assert_close(entropy, expected[1])
    torch.testing.assert_close(
        torch.cat([log_prob[:4], log_prob[5:]]), torch.cat([expected[0][:4], expected[0][5:]])
    )
    gradient = gradient_of((log_prob[:4], entropy), (weights[0, :4], weights[1]), leaf)
    assert gradient.isfinite().all() and not gradient[:, ::3].any() and gradient.any()


@pytest.mark.parametrize("offset", [3e4, -3e4])
def test_huge_logits_do_not_overflow(offset):
    """float32 knows 3e4 to 0.002, and so the log-prob; nothing is infinite, and the gradient is that of the differences."""
    logits, labels, _, weights = drawn()
    moved = (logits + offset).requires_grad_()
    found = log_probs_and_entropy(moved, labels)
    for value, right in zip(found, exact(moved.detach(), labels), strict=True):
        torch.testing.assert_close(value.double(), right, rtol=0, atol=0.02)
    assert gradient_of(found, weights, moved).isfinite().all()
    certain = torch.tensor([[0.0, 3e38, -3e38]], requires_grad=True)
    log_prob, entropy = log_probs_and_entropy(certain, torch.tensor([1]))
    assert log_prob.item() == 0 and entropy.item() == 0
    assert not gradient_of((log_prob, entropy), (1.0, 1.0), certain).any()


def test_a_logit_that_is_not_a_number_shows():
    logits, labels, _, _ = drawn()
    logits[2, 9] = math.nan
    log_prob, entropy = log_probs_and_entropy(logits, labels)
    assert log_prob.isnan().nonzero().tolist() == entropy.isnan().nonzero().tolist() == [[2]]


def test_a_temperature_of_zero_is_taken_as_verl_takes_it():
    logits, labels, _, _ = drawn()
    zero = log_probs_from_logits(logits, labels, torch.zeros(TOKENS))
    torch.testing.assert_close(zero, log_probs_from_logits(logits, labels, torch.full((TOKENS,), 1e-8)))


def test_what_is_held_beside_the_logits():
    """Two chunks in float32, whatever the number of tokens; the backward in place adds nothing that stays."""
    from torch.profiler import ProfilerActivity, profile

    chunk, tokens = 8, 512
    logits, labels, temperature, _ = drawn(torch.bfloat16, tokens=tokens)
    made = logits.requires_grad_() * 1

    def peak(run):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            kept = run()
        held = most = 0
        events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
        for event in sorted(events, key=lambda e: e.start_ns()):
            held += event.nbytes()
            most = max(most, held)
        return most, kept

    allowed = 2 * chunk * VOCABULARY * 4 + 40 * tokens
    most, found = peak(
        lambda: log_probs_and_entropy(made, labels, temperature, inplace_backward=True, chunk_size=chunk)
    )
    assert chunk * VOCABULARY * 4 < most < allowed
    most, _ = peak(lambda: torch.autograd.grad(found[0].sum() + found[1].sum(), made))
    assert chunk * VOCABULARY * 4 < most < allowed < made.numel() * 2


@pytest.mark.slow
def test_they_need_torch_alone():
    """A GPU machine without verl can import them."""
    code = "import sys, verl_credit.policy.log_probs\n"
    code += "print([m for m in ('verl', 'ray', 'transformers') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
