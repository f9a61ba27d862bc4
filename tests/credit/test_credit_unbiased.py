"""turn-group-unbiased by exact enumeration: the policy decides how many turns to take.

At turn 0 and at turn 1 a trajectory either searches with query a or b, or answers. Gains depend on the query and
the turn, the outcome on the whole path. Everything is enumerated: the gradient of the expected total against the
expectation of the estimator over groups of independent trajectories.
"""

import itertools
import math

import pytest
import torch

from kit.modes import read_by
from verl_credit.credit import MODES, turn_credit

SEARCHES = ("a", "b")
GAIN = {(0, "a"): 0.5, (0, "b"): -0.1, (1, "a"): 0.3, (1, "b"): -0.4}
ALPHA = 0.7
PATHS = [("answer",)] + [
    (first, *rest) for first in SEARCHES for rest in (("answer",), ("a", "answer"), ("b", "answer"))
]


def outcome(path):
    return {"answer": 0.2, "a": 0.9, "b": 0.4}[path[0]] - (0.3 if len(path) == 3 and path[1] == "b" else 0.0)


def gains(path, first):
    """{turn: gain} of a path, measured from turn ``first`` on."""
    return {turn: GAIN[turn, action] for turn, action in enumerate(path[:-1]) if turn >= first}


def total(path, first):
    return outcome(path) + ALPHA * sum(gains(path, first).values())


def log_probs(theta):
    """{(turn, history, action): log-prob}; after two searches the trajectory has to answer."""
    table = {}
    for turn, history in ((0, ()), (1, ("a",)), (1, ("b",))):
        offset = 3 * (0 if turn == 0 else 1 + SEARCHES.index(history[0]))
        row = torch.log_softmax(theta[offset : offset + 3], dim=0)
        for place, action in enumerate((*SEARCHES, "answer")):
            table[turn, history, action] = row[place]
    return table


def decisions(path):
    return [(turn, path[:turn], action) for turn, action in enumerate(path) if turn < 2]


def true_gradient(theta, first=0):
    table = log_probs(theta)
    value = sum(
        torch.stack([table[d] for d in decisions(path)]).sum().exp() * total(path, first) for path in PATHS
    )
    return torch.autograd.grad(value, theta)[0]


def expected_estimate(theta, n, **options):
    table = log_probs(theta)
    scores = {
        key: torch.autograd.grad(value, theta, retain_graph=True)[0].detach() for key, value in table.items()
    }
    weight = {path: torch.stack([table[d] for d in decisions(path)]).sum().exp().item() for path in PATHS}
    groups = list(itertools.product(PATHS, repeat=n))
    batches = [[group] for group in groups] if of_batch(options) else [groups]
    advantages = [row for batch in batches for row in credit_of(batch, **options).advantage_B_K1.tolist()]
    estimate, rows = torch.zeros_like(theta), iter(advantages)
    for group in groups:
        probability = math.prod(weight[path] for path in group)
        for path, advantage in zip(group, rows, strict=False):
            for turn, key in enumerate(decisions(path)):
                estimate += probability * scores[key] * advantage[turn] / n
    return estimate.detach()


def of_batch(options):
    """Other prompts of the batch would matter, so that each group needs a call of its own."""
    return MODES[options["info_gain_norm_mode"]].scope == "batch"


def credit_of(groups, first=0, **options):
    """One batch with a prompt for each group."""
    paths = [path for group in groups for path in group]
    gain = torch.zeros(len(paths), 2, dtype=torch.float64)
    mask = torch.zeros(len(paths), 2, dtype=torch.bool)
    for row, path in enumerate(paths):
        for turn, value in gains(path, first).items():
            gain[row, turn], mask[row, turn] = value, True
    outcomes = torch.tensor([outcome(path) for path in paths], dtype=torch.float64)
    n_tool_turns = torch.tensor([len(path) - 1 for path in paths])
    prompt = torch.tensor([number for number, group in enumerate(groups) for _ in group])
    return turn_credit(outcomes, gain, mask, prompt, n_tool_turns_B=n_tool_turns, **options)


@pytest.fixture
def theta():
    values = torch.tensor([0.3, -0.2, 0.1, -0.5, 0.4, 0.6, 0.2, 0.0, -0.3], dtype=torch.float64)
    return values.requires_grad_()


@pytest.mark.parametrize("mode", ["turn-group-unbiased", "leave_one_out"])
@pytest.mark.parametrize("first, n", [(0, 2), (0, 3), (1, 2)])
def test_the_expected_estimate_is_the_gradient(theta, first, n, mode):
    """first=1: the first turn has no gain in any row (info_gain_first_turn=none)."""
    estimate = expected_estimate(theta, n, first=first, **read_by(mode, alpha=ALPHA))
    torch.testing.assert_close(estimate, true_gradient(theta, first), rtol=0, atol=1e-10)
