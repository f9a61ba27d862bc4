"""Sketches and the gradients of turns: against autograd through transformers alone, and the trainer's own loss."""

import copy
import math

import numpy as np
import pytest
import torch

from kit.tiny_models import exact_norms, tiny_model
from verl_credit.policy.attention.implementation import AUTO
from verl_credit.policy.packed import PackedPolicy
from verl_credit.study.fidelity.credits import Credit
from verl_credit.study.fidelity.gradients import (
    CountSketch,
    credited,
    square_of_means,
    tokens_of,
    true_credit,
    turn_gradients,
)
from verl_credit.study.fidelity.true_values import ScoredTurn
from verl_credit.study.fidelity.turn_rows import turn_batch
from verl_credit.study.twin_step import Objective, UpdateBatch, update
from verl_credit.worlds.rollouts.protocol import State, Step
from verl_credit.worlds.rollouts.rollout import Trajectory


def trajectory(prompt, *turns):
    """``turns``: what the policy wrote, and what the tool said then; the last without."""
    ids, steps = tuple(prompt), []
    for number, (written, *said) in enumerate(turns):
        state = State(0, len(prompt), ids, number)
        ids = (*ids, *written, *(said[0] if said else ()))
        after = State(0, len(prompt), ids, number + 1) if said else None
        steps.append(Step(state, written, after, None if said else 1.0))
    return Trajectory(steps)


GROUPS = [
    [
        trajectory((7, 8, 9), ((10, 11, 2), (20, 21)), ((12, 2),)),
        trajectory((7, 8, 9), ((10, 11, 2), (20, 21)), ((13, 14, 15, 2),)),
    ],
    [trajectory((5, 6), ((16, 2),)), trajectory((5, 6), ((17, 2), (22,)), ((18, 2), (23, 24)), ((19,),))],
]
ADVANTAGES = [[0.5, -1.0], [2.0, 0.25], [-0.75], [1.0, 0.0, -2.0]]  # by trajectory
PATHS = [path for group in GROUPS for path in group]


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3", "sdpa", num_hidden_layers=1, tie_word_embeddings=True)


def test_a_sketch_keeps_inner_products_on_average():
    """Over 400 draws of buckets and signs: unbiased, with the variance (|x|²|y|² + (x.y)² - 2 sum x²y²) / buckets."""
    random = torch.Generator().manual_seed(0)
    x = 1 + torch.randn(300, generator=random, dtype=torch.float64)  # without signs, buckets would add up
    y = 0.5 * x + torch.randn(300, generator=random, dtype=torch.float64)
    found = []
    for seed in range(400):
        sketch = CountSketch(300, buckets=64, seed=seed)
        found.append(float(sketch([x[:100].view(4, 25), x[100:]]) @ sketch([y])))
    error = np.array(found) - float(x @ y)
    variance = float((x @ x) * (y @ y) + (x @ y) ** 2 - 2 * (x**2 * y**2).sum()) / 64
    assert abs(error.mean()) < 4 * math.sqrt(variance / 400)
    assert error.var() == pytest.approx(variance, rel=0.3)


def test_a_sketch_is_linear_and_of_its_seed_alone():
    x, y = torch.randn(2, 5000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    sketch = CountSketch(5000, seed=3)
    torch.testing.assert_close(sketch([2 * x - y]), 2 * sketch([x]) - sketch([y]))
    assert torch.equal(sketch([x]), CountSketch(5000, seed=3)([x]))
    assert not torch.equal(sketch([x]), CountSketch(5000, seed=4)([x]))
    cosine = torch.nn.functional.cosine_similarity
    assert abs(cosine(sketch([x]), sketch([x + y]), 0) - cosine(x, x + y, 0)) < 4 * math.sqrt(2 / 16_384)


@pytest.mark.slow
def test_a_turns_gradient_is_that_of_its_written_tokens(model):
    """One token at a time, each from a forward of what stood before it."""
    said = []
    found = turn_gradients(model, PATHS, say=lambda done, of: said.append((done, of)))
    assert len(found) == 7 and {(len(one), one.dtype) for one in found.values()} == {
        (16_384, np.dtype("float32"))
    }
    assert said == [(n, 7) for n in range(1, 8)]  # the first turn of the first prompt once
    sketch = CountSketch(sum(p.numel() for p in model.parameters()))
    for path in PATHS:
        for step in path.steps:
            plain = copy.deepcopy(model).double()
            plain.set_attn_implementation("eager")
            exact_norms(plain)
            ids = step.state.ids
            for token in step.turn_ids:
                plain(torch.tensor([ids])).logits[0, -1].log_softmax(-1)[token].backward()
                ids = (*ids, token)
            wanted = sketch([p.grad for p in plain.parameters()])
            error = torch.from_numpy(found[step.state.ids, step.turn_ids]).double() - wanted
            assert float(error.norm() / wanted.norm()) < 1e-5
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.slow
def test_a_batchs_sum_is_the_gradient_of_the_trainers_packed_loss(model):
    """Token-mean over both prompts, on-policy: the step of gradient descent is - sum of A G / tokens."""
    found = credited(GROUPS, turn_gradients(model, PATHS), Credit("", np.concatenate(ADVANTAGES)))
    tokens = tokens_of(GROUPS)
    assert tokens.tolist() == [12, 7]
    batch = turn_batch(PATHS, [{"reward_model": {"ground_truth": None}}])
    packed = copy.deepcopy(model)
    packed.set_attn_implementation(AUTO)
    policy = PackedPolicy(packed)
    prompts, responses = ([torch.tensor(i) for i in ids] for ids in (batch.prompt_ids, batch.response_ids))
    with torch.no_grad():
        log_prob_B_T, _ = policy.responses(prompts, responses, batch.response_mask_B_T.bool())
    advantage_B_T = torch.zeros(batch.turn_ids_B_T.shape)
    for row, of_path in enumerate(ADVANTAGES):
        for turn, advantage in enumerate(of_path):
            advantage_B_T[row][batch.turn_ids_B_T[row] == turn] = advantage
    rows = UpdateBatch(
        prompts, responses, batch.turn_ids_B_T, batch.response_mask_B_T.bool(), log_prob_B_T, advantage_B_T,
        torch.ones_like(advantage_B_T),
    )  # fmt: skip
    objective = Objective(0.2, 0.28, 3.0, "token", False, "token-mean", mini_batch_rows=4, grad_clip=1e9)
    before = [p.detach().clone() for p in packed.parameters()]
    update(policy, torch.optim.SGD(packed.parameters(), lr=1.0), rows, objective)
    moved = [p.detach() - old for p, old in zip(packed.parameters(), before, strict=True)]
    wanted = CountSketch(sum(p.numel() for p in moved))(moved).numpy()
    error = found.first_P_S.sum(0) / tokens.sum() - wanted
    assert np.linalg.norm(error) < 1e-5 * np.linalg.norm(wanted)


def test_true_advantages_stand_in_halves(model):
    gradients = turn_gradients(model, PATHS, buckets=32)
    halves = np.array([[1.0, 2, 3, 4, 5, 6, 7, 8], [-1.0, 0, 1, 0, 3, 0, 1, 0]])
    turns = [
        ScoredTurn(0, 0, 0, "tool", "", None, (a + b) / 2, a, b, 0.0, 0.0, 0.0, None, 1.0)
        for a, b in halves.T
    ]
    found = true_credit(GROUPS, gradients, turns)
    for half, credit_N in zip(("first_P_S", "second_P_S"), halves, strict=True):
        wanted = credited(GROUPS, gradients, Credit("", credit_N)).first_P_S
        np.testing.assert_allclose(getattr(found, half), wanted)
    star = credited(GROUPS, gradients, Credit("", halves.mean(0)))
    np.testing.assert_allclose(found.both_P_S, star.both_P_S)
    one, other = ([gradients[step.state.ids, step.turn_ids] for step in path.steps] for path in GROUPS[0])
    cross = (1.0 * one[0] + 2 * one[1]) @ (1.0 * other[0]) + (3.0 * other[0] + 4 * other[1]) @ (-one[0])
    assert found.square_P[0] == pytest.approx(2 * cross, rel=1e-5)


def test_the_square_of_a_prompts_mean_has_neither_a_rollouts_noise_nor_a_shared_values():
    """Rollouts of mean (.3, .3), each half with a value's noise that all rollouts share: 16 * .18 on average."""
    random = np.random.default_rng(0)
    x_N_n_S = 0.3 + 0.5 * random.normal(size=(5000, 4, 2))
    halves = [x_N_n_S + 0.3 * random.normal(size=(5000, 1, 1)) for _ in range(2)]
    found = np.array([square_of_means(a, b) for a, b in zip(*halves, strict=True)])
    error = found.std() / math.sqrt(5000)
    assert found.mean() == pytest.approx(16 * 0.18, abs=4 * error)
    assert error < 0.1  # by one half it would be 16 * .36, with a rollout's own noise 5 or more
    assert math.isnan(square_of_means(np.ones((1, 2)), np.ones((1, 2))))
