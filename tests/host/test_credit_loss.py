"""The policy loss: an oracle, gradients, and what must not matter."""

import math
from functools import partial

import pytest
import torch

from verl_credit.credit import AGG_MODES, RATIO_LEVELS, aggregate, turn_policy_loss

CLIP = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.08}
clipped_loss = partial(turn_policy_loss, **CLIP)


def batch(seed=0, rows=5, tokens=13, dtype=torch.float64, noise=0.1):
    """Arguments of `clipped_loss`; policy tokens are ~2/3 of all, turns are ~3 tokens long."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, tokens, generator=generator) < 0.7
    mask[:, -2:] = False
    ids = torch.arange(tokens).expand(rows, tokens) // 3
    ids = torch.where(mask, ids, -1)
    old = -torch.rand(rows, tokens, generator=generator, dtype=torch.float64) * 2
    log_prob = old + noise * torch.randn(rows, tokens, generator=generator, dtype=torch.float64)
    advantage = torch.randn(rows, tokens, generator=generator, dtype=torch.float64)
    scale = 0.7 + 0.6 * torch.rand(rows, tokens, generator=generator, dtype=torch.float64)
    tensors = [tensor.to(dtype) for tensor in (log_prob, old, advantage)] + [mask.to(dtype), ids]
    return tensors, scale.to(dtype)


def oracle(tensors, scale, level, cap=None):
    """Per-token losses {(row, t): loss} of the policy tokens, from the formulas."""
    log_prob, old, advantage, mask, ids = (tensor.tolist() for tensor in tensors)
    losses = {}
    for b in range(len(mask)):
        policy = [t for t in range(len(mask[b])) if mask[b][t]]
        for t in policy:
            same = {"token": [t], "turn": [u for u in policy if ids[b][u] == ids[b][t]], "sequence": policy}[
                level
            ]
            ratio = math.exp(sum(log_prob[b][u] - old[b][u] for u in same) / len(same))
            low, high = 1 - scale[b][t] * CLIP["clip_ratio_low"], 1 + scale[b][t] * CLIP["clip_ratio_high"]
            a = advantage[b][t]
            losses[b, t] = max(-a * ratio, -a * min(max(ratio, low), high))
            if cap is not None and a < 0:
                losses[b, t] = min(losses[b, t], -a * cap)
    return losses


@pytest.mark.parametrize("level", RATIO_LEVELS)
@pytest.mark.parametrize("cap", [None, 1.01])
@pytest.mark.parametrize("seed", range(5))
def test_oracle(level, cap, seed):
    tensors, scale = batch(seed)
    losses = oracle(tensors, scale.tolist(), level, cap)
    loss, metrics = clipped_loss(*tensors, ratio_level=level, clip_scale_B_T=scale, clip_ratio_c=cap)
    assert loss.item() == pytest.approx(sum(losses.values()) / len(losses), abs=1e-12)
    delta = (tensors[1] - tensors[0])[tensors[3].bool()]
    assert metrics["ppo_kl"].item() == pytest.approx(delta.mean().item())
    in_policy = scale[tensors[3].bool()]
    assert metrics["clip_scale_mean"].item() == pytest.approx(in_policy.mean().item())
    assert metrics["clip_scale_std"].item() == pytest.approx(in_policy.std(correction=0).item())
    uncapped = oracle(tensors, scale.tolist(), level)
    capped = sum(losses[key] != uncapped[key] for key in losses)
    assert metrics["pg_clipfrac_lower"].item() == pytest.approx(capped / len(losses))
    assert capped > 0 or cap is None or level == "sequence"


@pytest.mark.parametrize("level", RATIO_LEVELS)
@pytest.mark.parametrize("cap", [None, 1.01])
def test_gradient(level, cap):
    """Token level: finite differences. Shared ratios: d loss_t / d log_prob_t = -A_t rho where not clipped.

    (Their gradient is by construction not the derivative of their value: it is per token.)
    """
    tensors, scale = batch(1, rows=3, tokens=8)
    rest, log_prob = tensors[1:], tensors[0].requires_grad_()

    def loss_of(values):
        return clipped_loss(
            values, *rest, ratio_level=level, clip_scale_B_T=scale, clip_ratio_c=cap, loss_agg_mode="token-sum"
        )[0]  # fmt: skip

    if level == "token":
        assert torch.autograd.gradcheck(loss_of, (log_prob,), eps=1e-7)
        return
    loss_of(log_prob).backward()
    rho_of = oracle(
        [log_prob.detach(), rest[0], -torch.ones_like(rest[1]), *rest[2:]], 0 * scale + 1e6, level
    )
    losses = oracle([log_prob.detach(), *rest], scale.tolist(), level, cap)
    for b in range(3):
        for t in range(8):
            unclipped = (b, t) in losses and losses[b, t] == pytest.approx(
                -rest[1][b, t].item() * rho_of[b, t]
            )
            want = losses[b, t] if unclipped else 0.0
            assert log_prob.grad[b, t].item() == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("level", RATIO_LEVELS)
def test_no_gradient_through_advantages_old_log_probs_scales_and_weights(level):
    tensors, scale = batch(2)
    weights = torch.ones_like(scale)
    for tensor in (*tensors[:3], scale, weights):
        tensor.requires_grad_()
    loss, metrics = clipped_loss(
        *tensors, ratio_level=level, clip_scale_B_T=scale, rollout_is_weights=weights
    )
    loss.backward()
    assert tensors[0].grad.abs().sum() > 0
    assert all(tensor.grad is None for tensor in (*tensors[1:3], scale, weights))
    assert not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize("level", RATIO_LEVELS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_stands_where_the_mask_is_0_does_not_matter(level, bad):
    tensors, scale = batch(8)
    weights = torch.ones_like(scale)
    outside = tensors[3] == 0
    dirty = [tensor.masked_fill(outside, bad) for tensor in tensors[:3]]
    ids = tensors[4].masked_fill(outside, 10**6)
    results = []
    for values, turn_ids, c, w in (
        (tensors[:3], tensors[4], scale, weights),
        (dirty, ids, scale.masked_fill(outside, bad), weights.masked_fill(outside, bad)),
    ):
        log_prob = values[0].clone().requires_grad_()
        loss, metrics = clipped_loss(
            log_prob, *values[1:], tensors[3], turn_ids, ratio_level=level, clip_scale_B_T=c,
            rollout_is_weights=w, clip_ratio_c=3.0
        )  # fmt: skip
        loss.backward()
        results.append((loss.detach(), log_prob.grad, metrics))
    (loss, gradient, metrics), (dirty_loss, dirty_gradient, dirty_metrics) = results
    assert torch.equal(loss, dirty_loss)
    assert torch.equal(gradient, dirty_gradient)
    assert metrics == dirty_metrics


MICRO = {
    "token-mean": "batch_num_tokens",
    "token-sum": None,
    "seq-mean-token-sum": "global_batch_size",
    "seq-mean-token-sum-norm": "global_batch_size",
    "seq-mean-token-mean": "global_batch_size",
}


@pytest.mark.parametrize("agg_mode", AGG_MODES)
@pytest.mark.parametrize("level", RATIO_LEVELS)
def test_micro_batches_padding_and_row_order_do_not_matter(level, agg_mode):
    tensors, scale = batch(9, rows=7)
    tensors[3][3] = 0  # a row without policy tokens is no sequence
    totals = {
        "batch_num_tokens": int(tensors[3].sum()),
        "global_batch_size": int((tensors[3].sum(dim=1) > 0).sum()),
        "loss_scale_factor": 20,
    }

    def gradient(pieces, pad=0):
        grad = torch.zeros_like(tensors[0])
        total = 0.0
        for rows in pieces:
            part = [torch.nn.functional.pad(tensor[rows], (0, pad)) for tensor in (*tensors, scale)]
            log_prob = part[0].requires_grad_()
            loss, _ = clipped_loss(
                log_prob, *part[1:5], clip_scale_B_T=part[5], ratio_level=level, loss_agg_mode=agg_mode,
                **totals
            )  # fmt: skip
            loss.backward()
            grad[rows] = log_prob.grad[:, : grad.shape[1]]
            total += loss.item()
        return total, grad

    whole = gradient([list(range(7))])
    for other in (
        gradient([[0, 4], [3], [6, 1, 2], [5]]),
        gradient([[6, 5, 4, 3, 2, 1, 0]]),
        gradient([[0, 1, 2], [3, 4, 5, 6]], pad=5),
    ):
        assert other[0] == pytest.approx(whole[0], abs=1e-12)
        torch.testing.assert_close(other[1], whole[1])
    if MICRO[agg_mode]:
        counted_here = clipped_loss(
            *tensors, clip_scale_B_T=scale, ratio_level=level, loss_agg_mode=agg_mode, loss_scale_factor=20
        )[0]  # fmt: skip
        assert counted_here.item() == pytest.approx(whole[0])


@pytest.mark.parametrize("agg_mode", AGG_MODES)
def test_data_parallel_ranks_average_to_the_whole_batch(agg_mode):
    loss = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0, 1]] * 6)
    whole = aggregate(loss, mask, agg_mode)
    counts = {"batch_num_tokens": 18, "global_batch_size": 6}
    ranks = [
        aggregate(loss[rows], mask[rows], agg_mode, dp_size=2, **counts) for rows in ([0, 3, 4], [5, 1, 2])
    ]
    torch.testing.assert_close(sum(ranks) / 2, whole)
    if MICRO[agg_mode]:
        with pytest.raises(ValueError, match=f"{MICRO[agg_mode]} is needed when dp_size=2"):
            aggregate(loss, mask, agg_mode, dp_size=2)


@pytest.mark.parametrize("agg_mode", AGG_MODES)
def test_a_batch_without_policy_tokens_gives_zero(agg_mode):
    tensors, scale = batch(0)
    log_prob = tensors[0].requires_grad_()
    loss, metrics = clipped_loss(
        *tensors[:3], torch.zeros_like(scale), tensors[4], loss_agg_mode=agg_mode, clip_scale_B_T=scale
    )
    loss.backward()
    assert loss == 0
    assert (log_prob.grad == 0).all()
    assert all(value == 0 for value in metrics.values())


@pytest.mark.parametrize("level", RATIO_LEVELS)
def test_extreme_ratios_stay_finite(level):
    tensors, scale = batch(1, noise=200.0)
    tensors[2] = -tensors[2].abs()
    tensors[0].requires_grad_()
    loss, _ = clipped_loss(*tensors, ratio_level=level, clip_scale_B_T=scale)
    loss.backward()
    assert loss.isfinite()
    assert tensors[0].grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_inputs_are_computed_in_float32(dtype):
    tensors, scale = batch(2, dtype=dtype)
    exact = clipped_loss(*(t.double() for t in tensors[:4]), tensors[4], clip_scale_B_T=scale.double())
    loss, metrics = clipped_loss(*tensors, clip_scale_B_T=scale)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact[0].item(), abs=1e-6)
    for name, value in metrics.items():
        assert value.item() == pytest.approx(exact[1][name].item(), abs=1e-6), name


@pytest.mark.parametrize("level", RATIO_LEVELS)
@pytest.mark.parametrize("agg_mode", AGG_MODES)
def test_nothing_reads_a_value_back_from_the_device(level, agg_mode):
    """On the meta device any .item(), bool() or data-dependent shape raises."""
    tensors, scale = batch(0)
    tensors, scale = [tensor.to("meta") for tensor in tensors], scale.to("meta")
    log_prob = tensors[0].requires_grad_()
    loss, metrics = clipped_loss(
        *tensors, ratio_level=level, loss_agg_mode=agg_mode, clip_scale_B_T=scale, clip_ratio_c=3.0,
        rollout_is_weights=scale
    )  # fmt: skip
    loss.backward()
    assert log_prob.grad.shape == log_prob.shape
    assert all(value.dim() == 0 for value in metrics.values())


def test_bad_arguments_are_named():
    tensors, scale = batch(0)
    wrong = [
        ({"ratio_level": "turns"}, "ratio_level='turns'.*did you mean 'turn'"),
        ({"loss_agg_mode": "mean"}, "loss_agg_mode='mean' is not known.*accepted: token-mean"),
        ({"clip_scale_B_T": scale[:, :3]}, "clip_scale_B_T has shape"),
        ({"rollout_is_weights": scale[:2]}, "rollout_is_weights has shape"),
        ({"clip_ratio_c": 1.0}, "clip_ratio_c=1.0"),
    ]
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            clipped_loss(*tensors, **options)
    with pytest.raises(ValueError, match="turn_ids_B_T has shape"):
        clipped_loss(*tensors[:4], tensors[4][:, 1:])
