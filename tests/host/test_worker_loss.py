"""The loss as verl's worker calls it, with verl's configuration and nested rows: beside verl's own."""

import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from verl_credit.host.actor.policy_loss import TurnPolicyLossConfig, credit_ppo_loss
from verl_credit.host.engine.log_prob_engine import nested
from verl_credit.names import CLIP_SCALE, LOSS_MODE, TURN_IDS

ROWS = [(3, 6), (2, 9), (4, 5)]  # prompt and response tokens


def worker_batch(log_probs):
    random = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randn(n, generator=random)  # noqa: E731
    ids = [torch.arange(n) // 3 for _, n in ROWS]
    ids[1][3:5] = -1  # an observation
    old = [row[p - 1 : -1].detach() + 0.3 * draw(n) for row, (p, n) in zip(log_probs, ROWS, strict=True)]
    fields = {
        "prompts": nested([torch.zeros(p, dtype=torch.long) for p, _ in ROWS]),
        "responses": nested([torch.zeros(n, dtype=torch.long) for _, n in ROWS]),
        "response_mask": nested([(row >= 0).long() for row in ids]),
        "old_log_probs": nested(old),
        "advantages": nested([draw(n) for _, n in ROWS]),
        TURN_IDS: nested(ids),
        CLIP_SCALE: nested([torch.linspace(0.2, 3.0, n) for _, n in ROWS]),
    }
    data = TensorDict(fields, batch_size=len(ROWS))
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=None, global_batch_size=None)
    return data


def result_of(loss, policy_loss):
    log_probs = [torch.linspace(-3, -1, p + n).requires_grad_() for p, n in ROWS]
    config = ActorConfig(
        strategy="fsdp2", rollout_n=3, ppo_micro_batch_size_per_gpu=1, clip_ratio=0.2, policy_loss=policy_loss
    )
    value, metrics = loss(config, {"log_probs": nested(log_probs)}, worker_batch(log_probs))
    value.backward()
    return value.detach(), torch.cat([row.grad for row in log_probs]), metrics


def test_at_token_level_with_an_even_clip_it_is_verls_own():
    ours = TurnPolicyLossConfig(loss_mode=LOSS_MODE, ratio_level="token", dynamic_clip=False)
    value, gradient, metrics = result_of(credit_ppo_loss, ours)
    expected, expected_gradient, verls = result_of(ppo_loss, PolicyLossConfig(loss_mode="vanilla"))
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradient, expected_gradient)
    assert gradient.any()
    assert verls.keys() <= metrics.keys()
    assert (
        0 < metrics["actor/pg_clipfrac"].aggregate() == pytest.approx(verls["actor/pg_clipfrac"].aggregate())
    )


def test_turn_ids_and_clip_scales_reach_it():
    results = [
        result_of(
            credit_ppo_loss,
            TurnPolicyLossConfig(loss_mode=LOSS_MODE, ratio_level=level, dynamic_clip=dynamic),
        )
        for level, dynamic in (("token", False), ("turn", False), ("turn", True))
    ]
    assert len({float(value) for value, *_ in results}) == 3
