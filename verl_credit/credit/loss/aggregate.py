"""Aggregation of a loss matrix to the scalar that is differentiated, with verl's modes and scalings."""

import torch

from verl_credit.credit.checks import check_name

AGG_MODES = "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"


def aggregate(
    loss_B_T: torch.Tensor,
    mask_B_T: torch.Tensor,
    loss_agg_mode: str,
    *,
    dp_size: int = 1,
    batch_num_tokens: int | torch.Tensor | None = None,
    global_batch_size: int | torch.Tensor | None = None,
    loss_scale_factor: float | None = None,
) -> torch.Tensor:
    """Sum over policy tokens, divided according to the mode.

        token-mean                sum over tokens / batch_num_tokens * dp_size
        token-sum                 sum over tokens * dp_size
        seq-mean-token-sum        sum over rows of the row's sum / global_batch_size * dp_size
        seq-mean-token-sum-norm   the same / loss_scale_factor (default: the padded width T)
        seq-mean-token-mean       sum over rows of the row's mean / global_batch_size * dp_size

    `batch_num_tokens` and `global_batch_size` count the whole optimiser step, so that gradients of micro-batches and of
    data-parallel ranks (which average them) add up to the batch's. None counts this micro-batch, which is refused for
    dp_size > 1. Rows without a policy token do not count as sequences.
    Same values as verl 0.9.1's `agg_loss`; departure: a micro-batch without policy tokens gives 0, not NaN.
    """
    check_name("loss_agg_mode", loss_agg_mode, AGG_MODES)
    mask_B_T = mask_B_T.bool()
    loss_B_T = torch.where(mask_B_T, loss_B_T, 0.0)
    if loss_agg_mode == "token-sum":
        return loss_B_T.sum() * dp_size
    if loss_agg_mode == "token-mean":
        count = _whole_batch("batch_num_tokens", batch_num_tokens, mask_B_T.sum(), dp_size)
        return loss_B_T.sum() / count * dp_size

    tokens_B = mask_B_T.sum(dim=1)
    row_loss_B = loss_B_T.sum(dim=1)
    if loss_agg_mode == "seq-mean-token-mean":
        row_loss_B = row_loss_B / tokens_B.clamp(min=1)
    count = _whole_batch("global_batch_size", global_batch_size, (tokens_B > 0).sum(), dp_size)
    loss = row_loss_B.sum() / count * dp_size
    if loss_agg_mode == "seq-mean-token-sum-norm":
        loss = loss / (mask_B_T.shape[1] if loss_scale_factor is None else loss_scale_factor)
    return loss


def _whole_batch(name: str, given: int | torch.Tensor | None, here: torch.Tensor, dp_size: int):
    if given is not None:  # at least 1, so that a mini-batch without tokens has loss 0, not NaN
        return given.clamp(min=1) if isinstance(given, torch.Tensor) else max(given, 1)
    if dp_size > 1:
        raise ValueError(f"{name} is needed when dp_size={dp_size}: one rank cannot count the whole batch")
    return here.clamp(min=1)
