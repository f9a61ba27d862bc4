"""Clipped policy loss with the importance ratio of a token, of a turn, or of the whole trajectory."""

from __future__ import annotations

from verl_credit.credit.arguments import check_name, check_shape, output_dtype
from verl_credit.lazy import torch


def turn_policy_loss(
    log_prob_B_T: torch.Tensor,
    old_log_prob_B_T: torch.Tensor,
    advantage_B_T: torch.Tensor,
    response_mask_B_T: torch.Tensor,
    turn_ids_B_T: torch.Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_scale_B_T: torch.Tensor | None = None,
    clip_ratio_c: float | None = None,
    ratio_level: str = "turn",
    loss_agg_mode: str = "token-mean",
    rollout_is_weights: torch.Tensor | None = None,
    **whole_batch,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clipped surrogate loss; a turn's tokens share the ratio, and the clip range may differ per turn.

        delta_t = log_prob_t - old_log_prob_t
        rho     = exp(delta_t) | exp(mean of delta over the token's turn) | ... over the row     (ratio_level)
        loss_t  = max(-A_t rho_t, -A_t clip(rho_t, 1 - c_t clip_ratio_low, 1 + c_t clip_ratio_high))

    c_t = clip_scale_B_T, or 1. A shared ratio has the mean's value, and its gradient goes through each token's own
    log-probability (d rho / d log_prob_t = rho), as in GSPO.
    clip_ratio_c caps the loss of negative advantages at -A c (dual clip); None, as in the released turn loss, does not.
    ratio_level="token" with verl's clip_ratio_c and no clip scale is verl's vanilla loss, "sequence" its gspo loss.
    Half-precision inputs are computed in float32. Means are over policy tokens only, without observation tokens inside
    a turn.

    Values where the mask is 0 may be anything, NaN included. No gradient flows through advantages, old
    log-probabilities or clip scales. `aggregate` explains loss_agg_mode and whole_batch, its other arguments.
    Metrics are 0-dim tensors (nothing waits for the device): pg_clipfrac, pg_clipfrac_lower, ppo_kl, and
    clip_scale_mean and clip_scale_std (over policy tokens) with a clip scale.
    Shapes and names are checked; ids are not, because that would wait for the device: `turn_table` checks them.
    Departure from the release: turns come from ids, not from runs of equal advantages.
    Source: A2TGPO, 2605.06200; GSPO, 2507.18071; dual clip, 1912.09729.
    """
    check_name("ratio_level", ratio_level, RATIO_LEVELS)
    for name, tensor in (
        ("old_log_prob_B_T", old_log_prob_B_T),
        ("advantage_B_T", advantage_B_T),
        ("response_mask_B_T", response_mask_B_T),
        ("turn_ids_B_T", turn_ids_B_T),
        ("clip_scale_B_T", clip_scale_B_T),
        ("rollout_is_weights", rollout_is_weights),
    ):
        if tensor is not None:
            check_shape(name, tensor, log_prob_B_T.shape, "log_prob_B_T")
    if clip_ratio_c is not None and not clip_ratio_c > 1:
        raise ValueError(
            f"clip_ratio_c={clip_ratio_c} caps losses below the unclipped one; expected a number > 1"
        )

    mask_B_T = response_mask_B_T.bool()
    dtype = output_dtype(log_prob_B_T)
    advantage_B_T = torch.where(mask_B_T, advantage_B_T.detach().to(dtype), 0.0)
    delta_B_T = torch.where(mask_B_T, log_prob_B_T.to(dtype) - old_log_prob_B_T.detach().to(dtype), 0.0)
    ratio_B_T = importance_ratio(delta_B_T, mask_B_T, turn_ids_B_T, ratio_level)

    if clip_scale_B_T is None:
        clipped_B_T = ratio_B_T.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    else:
        scale_B_T = clip_scale_B_T.detach().to(output_dtype(clip_scale_B_T)).where(mask_B_T, 1.0)
        clipped_B_T = ratio_B_T.clamp(1 - clip_ratio_low * scale_B_T, 1 + clip_ratio_high * scale_B_T)
    free_B_T = -advantage_B_T * ratio_B_T
    bounded_B_T = -advantage_B_T * clipped_B_T
    loss_B_T = torch.maximum(free_B_T, bounded_B_T)
    n_tokens = mask_B_T.sum()
    count = n_tokens.clamp(min=1)
    metrics = {
        "pg_clipfrac": (bounded_B_T > free_B_T).logical_and_(mask_B_T).sum() / count,
        "pg_clipfrac_lower": delta_B_T.new_zeros(()),
        "ppo_kl": -delta_B_T.detach().sum() / count,
    }
    if clip_ratio_c is not None:
        cap_B_T = -advantage_B_T * clip_ratio_c
        negative_B_T = advantage_B_T < 0
        metrics["pg_clipfrac_lower"] = (negative_B_T & (loss_B_T > cap_B_T) & mask_B_T).sum() / count
        loss_B_T = torch.where(negative_B_T, torch.minimum(cap_B_T, loss_B_T), loss_B_T)
    if clip_scale_B_T is not None:
        excess_B_T = scale_B_T - 1  # other tokens have the scale 1 and contribute exactly 0
        mean = excess_B_T.sum() / count
        variance = (excess_B_T.square().sum() / count - mean**2).clamp(min=0)
        metrics |= {"clip_scale_mean": mean + n_tokens / count, "clip_scale_std": variance.sqrt()}
    if rollout_is_weights is not None:
        loss_B_T = loss_B_T * rollout_is_weights.detach()
    return aggregate(loss_B_T, mask_B_T, loss_agg_mode, **whole_batch), metrics


RATIO_LEVELS = ("token", "turn", "sequence")
TOKEN_LOG_RATIO_LIMIT = 20.0  # verl's vanilla loss clamps the token log-ratio to +-20
SEGMENT_LOG_RATIO_LIMIT = 10.0  # the released turn loss (and GSPO) caps the log-ratio at 10 from above


def importance_ratio(
    delta_B_T: torch.Tensor, mask_B_T: torch.Tensor, turn_ids_B_T: torch.Tensor, ratio_level: str
) -> torch.Tensor:
    """exp of the log-ratio `delta` at the given level; 1 where the mask is False.

        token:     exp(delta_t)
        turn:      exp(mean of delta over the policy tokens of t's turn)
        sequence:  exp(mean of delta over the row's policy tokens)

    A shared ratio takes its value from the mean and its gradient from each token's own log-probability
    (d ratio / d delta_t = ratio), as GSPO does. A row of T tokens has at most T turns, so that T-wide tables hold the sums
    without reading the ids. `delta` is 0 where the mask is False.
    """
    if ratio_level == "token":
        return delta_B_T.clamp(-TOKEN_LOG_RATIO_LIMIT, TOKEN_LOG_RATIO_LIMIT).exp()
    fixed_B_T = delta_B_T.detach()
    ids_B_T = torch.where(mask_B_T & (ratio_level == "turn"), turn_ids_B_T, 0).long()
    sums_B_T = torch.zeros_like(fixed_B_T).scatter_add_(1, ids_B_T, fixed_B_T)
    tokens_B_T = torch.zeros_like(fixed_B_T).scatter_add_(1, ids_B_T, mask_B_T.to(fixed_B_T.dtype))
    shared_B_T = torch.where(mask_B_T, (sums_B_T / tokens_B_T.clamp(min=1)).gather(1, ids_B_T), 0.0)
    own_B_T = delta_B_T - fixed_B_T  # zero, but the gradient flows through it
    return (own_B_T + shared_B_T).clamp(max=SEGMENT_LOG_RATIO_LIMIT).exp()


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
