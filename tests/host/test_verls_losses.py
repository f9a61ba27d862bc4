"""verl's own policy losses on advantages of turn modes: they run, and push where the advantage says."""

from dataclasses import replace

import pytest
import torch
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import ActorConfig

from verl_credit.config.keys.verl import VERLS_LOSSES
from verl_credit.credit import MODES, spread, turn_table

ROWS, TOKENS = 4, 9
IDS_B_T = torch.tensor([[0, 0, -1, 1, 1, -1, 2, 2, 2]] * ROWS)
MASK_B_T = IDS_B_T >= 0


def advantages(mode):
    """Rows that differ in outcome and in the order of their turn rewards."""
    table, random = turn_table(IDS_B_T, MASK_B_T), torch.Generator().manual_seed(0)
    reward_B_K = torch.rand(ROWS, 2, generator=random)
    made = {
        "anchor_B_K1": torch.tensor([[0, 1, 2]] * ROWS),
        "value_B_K1": torch.rand(ROWS, 3, generator=random),
        "state_score_B_K1": torch.rand(ROWS, 3, generator=random),
        "initial_score_B": torch.rand(ROWS, generator=random),
        "turn_tokens_B_K1": table.n_tokens_B_K1,
    }
    brought = {name: made[name] for name in mode.needs}
    credit = mode(
        torch.tensor([1.0, 0, 0, 1]),
        reward_B_K,
        table.tool_turn_mask_B_K,
        torch.zeros(ROWS).long(),
        **brought,
    )
    return spread(credit.advantage_B_K1, IDS_B_T, MASK_B_T).float()


PAIRS = [
    *((mode, "vanilla") for mode in MODES),
    *(("turn-group-v1d", loss) for loss in VERLS_LOSSES if loss != "vanilla"),
]


@pytest.mark.parametrize("mode, loss", PAIRS)
def test_a_loss_of_verls_pushes_every_token_where_its_turns_advantage_says(mode, loss):
    """At the policy that wrote the tokens. geo_mean has one advantage per trajectory, the mean of its tokens'.

    A loss gets a tensor and does not know which mode made it, so that each is tried once.
    """
    config = ActorConfig(strategy="fsdp2", rollout_n=ROWS, ppo_micro_batch_size_per_gpu=1)
    config = replace(config, policy_loss=replace(config.policy_loss, dro_beta=0.1))
    advantage_B_T = advantages(MODES[mode])
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
