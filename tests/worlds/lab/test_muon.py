"""Muon's step: the bits of its formula, however many matrices are computed at a time."""

import copy
import pickle

import pytest
import torch

from verl_credit.worlds.lab.warm_start import Muon, orthogonalize


def test_a_step_of_many_matrices_has_the_bits_of_the_formula_for_each_alone():
    generator = torch.Generator().manual_seed(0)

    def drawn(rows, columns):
        return torch.randn(rows, columns, generator=generator)

    shapes = [(32, 16), (16, 32), (24, 24)] * 4 + [
        (256, 128)
    ] * 2  # the last are large enough for parallel products
    matrices = [torch.nn.Parameter(drawn(*shape)) for shape in shapes]
    unused = torch.nn.Parameter(torch.ones(2, 2))
    expected, momenta = [p.detach().clone() for p in matrices], [torch.zeros(shape) for shape in shapes]
    optimizer = Muon([*matrices, unused], lr=0.02, momentum=0.9, weight_decay=0.1)
    for _ in range(2):
        for place, p in enumerate(matrices):
            p.grad = drawn(*p.shape)
            momenta[place] = momenta[place] * 0.9 + p.grad
            update = orthogonalize(p.grad + 0.9 * momenta[place])
            expected[place] *= 1 - 0.02 * 0.1
            expected[place].add_(update, alpha=-0.02 * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)
        optimizer.step()
    assert all(torch.equal(p, wanted) for p, wanted in zip(matrices, expected, strict=True))
    assert torch.equal(unused, torch.ones(2, 2))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_a_copy_makes_the_same_step(again):
    p = torch.nn.Parameter(torch.eye(3))
    p.grad = torch.ones(3, 3)
    optimizer = Muon([p])
    optimizer.step()
    copied = again(optimizer)
    (its,) = copied.param_groups[0]["params"]
    its.grad = p.grad.clone()
    optimizer.step()
    copied.step()
    assert torch.equal(its, p) and its is not p
