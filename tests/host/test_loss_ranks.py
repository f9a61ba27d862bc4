"""The loss over real gloo ranks, and over rows that are packed into one."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from verl_credit.credit import AGG_MODES, RATIO_LEVELS, turn_policy_loss

CLIP = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.08}
VOCABULARY, ROWS, TOKENS = 11, 6, 9


def batch():
    random = torch.Generator().manual_seed(0)
    mask = torch.rand(ROWS, TOKENS, generator=random) < 0.7
    ids = torch.where(mask, torch.arange(TOKENS) // 3, -1)
    token = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=random)
    old = -torch.rand(ROWS, TOKENS, generator=random, dtype=torch.float64) - 2
    advantage = torch.randn(ROWS, TOKENS, generator=random, dtype=torch.float64)
    scale = 0.7 + 0.6 * torch.rand(ROWS, TOKENS, generator=random, dtype=torch.float64)
    return mask, ids, token, old, advantage, scale


class Policy(torch.nn.Module):
    """Log-probs of tokens at their place, from one table."""

    def __init__(self):
        super().__init__()
        table = torch.randn(
            TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(1), dtype=torch.float64
        )
        self.table = torch.nn.Parameter(table * 0.1)

    def forward(self, token_B_T):
        log_prob = self.table.log_softmax(dim=1).expand(len(token_B_T), -1, -1)
        return log_prob.gather(2, token_B_T[..., None]).squeeze(2)


def step(policy, rows, level, agg_mode, ranks):
    """(loss of these rows, gradient of the table), the whole batch being counted."""
    mask, ids, token, old, advantage, scale = (tensor[rows] for tensor in batch())
    loss, _ = turn_policy_loss(
        policy(token), old, advantage, mask, ids, clip_scale_B_T=scale, ratio_level=level, loss_agg_mode=agg_mode,
        dp_size=ranks, batch_num_tokens=int(batch()[0].sum()), global_batch_size=ROWS, loss_scale_factor=20, **CLIP,
    )  # fmt: skip
    loss.backward()
    return loss.detach()


def one_rank(rank, store, results):
    """Every level and mode under DistributedDataParallel, which averages gradients over ranks."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    rows = [0, 4, 5, 2] if rank == 0 else [3, 1]  # ranks need not hold the same number of rows
    for level in RATIO_LEVELS:
        for agg_mode in AGG_MODES:
            policy = torch.nn.parallel.DistributedDataParallel(Policy())
            loss = step(policy, rows, level, agg_mode, 2)
            dist.all_reduce(loss)
            results[f"{rank}/{level}/{agg_mode}"] = (loss / 2, policy.module.table.grad)
            del policy  # it holds threads of the group, whose end would abort the process
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_gloo_ranks_are_one(tmp_path):
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(one_rank, (str(tmp_path / "store"), results), nprocs=2)
        for level in RATIO_LEVELS:
            for agg_mode in AGG_MODES:
                policy = Policy()
                loss = step(policy, list(range(ROWS)), level, agg_mode, 1)
                assert policy.table.grad.abs().max() > 0
                for rank in (0, 1):
                    their_loss, their_grad = results[f"{rank}/{level}/{agg_mode}"]
                    torch.testing.assert_close(their_loss, loss, rtol=0, atol=1e-12)
                    torch.testing.assert_close(their_grad, policy.table.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("level", ["token", "turn"])
@pytest.mark.parametrize("agg_mode", ["token-mean", "token-sum"])
def test_rows_packed_into_one_are_the_rows(level, agg_mode):
    """Turn ids going on from row to row; sequence ratios and means over sequences need the rows."""
    mask, ids, _, old, advantage, scale = batch()
    log_prob = old + 0.1 * torch.randn(
        ROWS, TOKENS, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    packed_ids = torch.where(mask, ids + 3 * torch.arange(ROWS)[:, None], -1)

    def run(shape, turn_ids):
        leaf = log_prob.clone().requires_grad_()
        tensors = [tensor.reshape(shape) for tensor in (leaf, old, advantage, mask, turn_ids)]
        loss, _ = turn_policy_loss(
            *tensors, clip_scale_B_T=scale.reshape(shape), ratio_level=level, loss_agg_mode=agg_mode, **CLIP
        )
        loss.backward()
        return loss.detach(), leaf.grad

    apart, packed = run((ROWS, TOKENS), ids), run((1, ROWS * TOKENS), packed_ids)
    torch.testing.assert_close(packed[0], apart[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(packed[1], apart[1], rtol=0, atol=1e-12)
