"""`none` is verl's GRPO, ratio level token is verl's vanilla loss, sequence its gspo loss, to 1e-6."""

import pytest
import torch
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig

from verl_credit.credit import AGG_MODES, aggregate, grpo, rloo, spread, turn_credit, turn_policy_loss


def grpo_batch(seed, groups=6, size=5, tokens=7):
    generator = torch.Generator().manual_seed(seed)
    group = torch.arange(groups).repeat(size)[torch.randperm(groups * size, generator=generator)]
    outcome = torch.randint(0, 5, (groups * size,), generator=generator) / 4
    for g in range(groups):  # equal outcomes are compared below
        rows = (group == g).nonzero().flatten()
        outcome[rows[0]], outcome[rows[1]] = 0.0, 1.0
    mask = torch.ones(len(outcome), tokens)
    mask[:, 3] = 0
    return outcome, group, mask


def verl_grpo(outcome, group, mask, **options):
    rewards = torch.zeros_like(mask)
    rewards[:, -1] = outcome
    return core_algos.compute_grpo_outcome_advantage(rewards, mask, group.numpy(), **options)[0]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("norm_by_std", [True, False])
def test_none_is_verls_grpo(seed, norm_by_std):
    outcome, group, mask = grpo_batch(seed)
    theirs = verl_grpo(outcome, group, mask, norm_adv_by_std_in_grpo=norm_by_std)
    gain = torch.randn(len(outcome), 2, generator=torch.Generator().manual_seed(seed))
    credit = turn_credit(
        outcome,
        gain,
        torch.ones_like(gain).bool(),
        group,
        info_gain_norm_mode="none",
        norm_by_std=norm_by_std,
    )
    turn_ids = torch.tensor([0, 0, 1, -1, 1, 2, 2]).expand_as(mask)
    ours = spread(credit.advantage_B_K1, turn_ids, mask)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert (spread(credit.clip_scale_B_K1, turn_ids, mask, fill=1.0) == 1).all()


def test_equal_outcomes_give_exactly_zero_where_verl_leaves_a_residue():
    outcome, group, mask = torch.full((6,), 0.35), torch.tensor([0, 0, 0, 0, 0, 0]), torch.ones(6, 2)
    assert (grpo(outcome, group, norm_by_std=True) == 0).all()
    assert verl_grpo(outcome, group, mask).abs().max() < 0.2  # the residue, divided by a std of about 1e-8


@pytest.mark.parametrize("seed", range(3))
def test_rloo_is_verls_but_for_groups_of_one(seed):
    outcome, group, _ = grpo_batch(seed)
    outcome, group = torch.cat([outcome, torch.tensor([0.7])]), torch.cat([group, torch.tensor([99])])
    rewards = torch.cat([outcome[:, None], torch.zeros(len(outcome), 2)], dim=1)
    theirs = core_algos.compute_rloo_outcome_advantage(rewards, torch.ones_like(rewards), group.numpy())[0]
    assert (float(rloo(outcome, group)[-1]), float(theirs[-1, 0])) == (0.0, pytest.approx(0.7))
    torch.testing.assert_close(rloo(outcome, group)[:-1], theirs[:-1, 0], rtol=0, atol=1e-6)


def test_a_group_of_one_as_in_verl_is_an_option():
    outcome, group, mask = torch.tensor([0.7, 0.0, 1.0]), torch.tensor([0, 1, 1]), torch.ones(3, 1)
    theirs = verl_grpo(outcome, group, mask)[:, 0]
    torch.testing.assert_close(grpo(outcome, group, singleton="raw"), theirs, rtol=0, atol=1e-6)
    assert grpo(outcome, group)[0] == 0


def loss_batch(seed, rows=6, tokens=17):
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(rows, tokens, generator=generator) < 0.7).float()
    mask[2] = 0
    old = -torch.rand(rows, tokens, generator=generator) * 2
    log_prob = old + 0.8 * torch.randn(rows, tokens, generator=generator)
    advantage = torch.randn(rows, tokens, generator=generator)
    weights = torch.rand(rows, tokens, generator=generator) * 2
    return log_prob, old, advantage, mask, torch.zeros_like(mask).long(), weights


GLOBAL = {
    "own": {},
    "global": {"dp_size": 2, "batch_num_tokens": 321, "global_batch_size": 40, "loss_scale_factor": 99},
}


@pytest.mark.parametrize("scope", GLOBAL)
@pytest.mark.parametrize("agg_mode", AGG_MODES)
@pytest.mark.parametrize(("level", "theirs"), [("token", "vanilla"), ("sequence", "gspo")])
def test_policy_loss(level, theirs, agg_mode, scope):
    config = ActorConfig(
        strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=0.15, clip_ratio_high=0.25,
        clip_ratio_c=1.5,
    )  # fmt: skip
    config.global_batch_info.update(GLOBAL[scope])
    for seed in range(3):
        log_prob, old, advantage, mask, ids, weights = loss_batch(seed)
        ours_in, theirs_in = log_prob.clone().requires_grad_(), log_prob.clone().requires_grad_()
        expected, their_metrics = core_algos.get_policy_loss_fn(theirs)(
            old, theirs_in, advantage, mask, agg_mode, config, rollout_is_weights=weights
        )
        loss, metrics = turn_policy_loss(
            ours_in, old, advantage, mask, ids, ratio_level=level, clip_ratio_low=0.15, clip_ratio_high=0.25,
            clip_ratio_c=1.5 if level == "token" else None, loss_agg_mode=agg_mode, rollout_is_weights=weights,
            **GLOBAL[scope],
        )  # fmt: skip
        expected.backward()
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(ours_in.grad, theirs_in.grad, rtol=1e-6, atol=1e-6)
        for name, value in metrics.items():
            assert value.item() == pytest.approx(their_metrics[f"actor/{name}"], abs=1e-6), name


@pytest.mark.parametrize("scope", GLOBAL)
@pytest.mark.parametrize("agg_mode", AGG_MODES)
def test_aggregation(agg_mode, scope):
    values, _, _, mask, _, _ = loss_batch(9)
    ours = aggregate(values, mask, agg_mode, **GLOBAL[scope])
    theirs = core_algos.agg_loss(values, mask, agg_mode, **GLOBAL[scope])
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
