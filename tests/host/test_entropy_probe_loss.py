"""The loss whose gradient the entropy probe takes."""

import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_credit.host.actor.entropy_probe import surrogate_loss
from verl_credit.host.engine.log_prob_engine import nested
from verl_credit.names import PROBE_PATH, PROBE_SCORE

ROWS = [(3, 4), (1, 2), (2, 5)]  # prompt and response tokens


@pytest.mark.parametrize("ranks", [1, 4])
def test_its_gradient_is_the_weights_where_the_model_reads_them(ranks):
    """Row by row: output j of a row is about its token j + 1."""
    random = torch.Generator().manual_seed(0)
    score = [torch.randn(r, generator=random, dtype=torch.float64) for _, r in ROWS]
    path = [torch.rand(r, generator=random, dtype=torch.float64) for _, r in ROWS]
    score[2][1] = path[2][1] = 0.0  # not the policy's, and nothing finite is promised there
    leaves = {
        name: [torch.randn(p + r, requires_grad=True) for p, r in ROWS] for name in ("log_probs", "entropy")
    }
    with torch.no_grad():
        leaves["log_probs"][2][2], leaves["entropy"][2][2] = -torch.inf, torch.nan
    ids = [[torch.zeros(n, dtype=torch.long) for n in row] for row in ROWS]
    fields = {"prompts": nested([p for p, _ in ids]), "responses": nested([r for _, r in ids])}
    data = TensorDict(fields | {PROBE_SCORE: nested(score), PROBE_PATH: nested(path)}, batch_size=len(ROWS))
    tu.assign_non_tensor(data, dp_size=ranks)
    loss, metrics = surrogate_loss({name: nested(rows) for name, rows in leaves.items()}, data)
    loss.backward()
    by_hand = 0.0
    for row, (prompt, response) in enumerate(ROWS):
        for j in range(response):
            at = prompt - 1 + j
            for name, weight in (("log_probs", score), ("entropy", path)):
                assert float(leaves[name][row].grad[at]) == pytest.approx(
                    ranks * float(weight[row][j]), rel=1e-6
                )
                if weight[row][j]:
                    by_hand += float(weight[row][j]) * float(leaves[name][row][at].detach())
    for rows in leaves.values():
        assert all(float(leaf.grad[-1]) == 0 for leaf in rows)
    assert metrics == {} and float(loss.detach()) == pytest.approx(ranks * by_hand, rel=1e-6)
