"""verl's own policy losses on advantages per turn: they run, and push where the advantage says."""

from dataclasses import replace

import pytest
import torch
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import ActorConfig

from verl_credit.config.keys.verl import VERLS_LOSSES
from verl_credit.credit import spread

ROWS, TOKENS = 4, 9
IDS_B_T = torch.tensor([[0, 0, -1, 1, 1, -1, 2, 2, 2]] * ROWS)
MASK_B_T = IDS_B_T >= 0


@pytest.mark.parametrize("loss", VERLS_LOSSES)
def test_a_loss_of_verls_pushes_every_token_where_its_turns_advantage_says(loss):
    """At the policy that wrote the tokens. geo_mean has one advantage per trajectory, the mean of its tokens'."""
    config = ActorConfig(strategy="fsdp2", rollout_n=ROWS, ppo_micro_batch_size_per_gpu=1)
    config = replace(config, policy_loss=replace(config.policy_loss, dro_beta=0.1))
    of_turns_B_K1 = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0))
    advantage_B_T = spread(of_turns_B_K1, IDS_B_T, MASK_B_T).float()
    old_B_T = -torch.rand(ROWS, TOKENS, generator=torch.Generator().manual_seed(1))
    log_prob_B_T = old_B_T.clone().requires_grad_()
    agg = "seq-mean-token-mean" if loss in ("gspo", "sapo") else "token-mean"
    value, _ = get_policy_loss_fn(loss)(old_B_T, log_prob_B_T, advantage_B_T, MASK_B_T.float(), agg, config)
    value.backward()
    push_B_T = -log_prob_B_T.grad
    assert value.isfinite() and push_B_T.isfinite().all() and not push_B_T[~MASK_B_T].any()
    if loss == "geo_mean":
        n_B_1 = MASK_B_T.sum(dim=1, keepdim=True)
        advantage_B_T = (advantage_B_T.sum(dim=1, keepdim=True) / n_B_1).where(MASK_B_T, 0.0)
    if loss != "clip_cov":  # it leaves tokens out at random
        assert torch.equal(push_B_T.sign(), advantage_B_T.sign())
    if loss not in ("geo_mean", "clip_cov"):
        ratio_B_T = (push_B_T / advantage_B_T)[advantage_B_T != 0]
        torch.testing.assert_close(ratio_B_T, ratio_B_T[:1].expand_as(ratio_B_T), rtol=1e-4, atol=0)
