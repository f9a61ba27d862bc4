"""Muon's step by its formula, and what it is made of."""

import torch

from verl_credit.worlds.lab.warm_start import Muon, orthogonalize


def drawn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_two_steps_by_the_formula():
    p, unused = torch.nn.Parameter(drawn(32, 16, seed=0)), torch.nn.Parameter(torch.ones(2, 2))
    expected, momentum = p.detach().clone(), torch.zeros(32, 16)
    optimizer = Muon([p, unused], lr=0.02, momentum=0.9, weight_decay=0.1)
    for seed in (1, 2):
        p.grad = drawn(32, 16, seed=seed)
        momentum = momentum * 0.9 + p.grad
        expected *= 1 - 0.02 * 0.1
        expected.add_(orthogonalize(p.grad + 0.9 * momentum), alpha=-0.02 * 2**0.5)
        optimizer.step()
    assert torch.equal(p.detach(), expected)
    assert torch.equal(unused, torch.ones(2, 2))


def test_singular_values_are_near_one():
    for shape in ((32, 16), (16, 32)):
        singular = torch.linalg.svdvals(orthogonalize(drawn(*shape, seed=3)))
        assert singular.min() > 0.5 and singular.max() < 1.3
