"""The turn modes: how outcome and information gain become an advantage per turn.

Each mode takes `Tables` and returns `(advantage_B_K, outcome_advantage_B, clip_scale_B_K)` in float64. A turn
without a gain of its own belongs to the segment of the row's next gain: it reads that turn's advantage and clip
scale, or the outcome's advantage and 1 after the last gain (so do columns past a row's turns). `Tables.backward`
says exactly this.
"""

from collections.abc import Callable

import torch

from verl_credit.credit.groups import group_stats
from verl_credit.credit.turn.adaptive_clip import adaptive_clip_scale
from verl_credit.credit.turn.tables import Tables
from verl_credit.credit.turn.unbiased import turn_group_unbiased

ModeOutput = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def none(tables: Tables) -> ModeOutput:
    """A_k = R for every turn: GRPO's outcome advantage. The gains are not read."""
    outcome_B = tables.outcome_advantage()
    return outcome_B[:, None].expand_as(tables.gain_B_K), outcome_B, tables.ones()


def joint(tables: Tables) -> ModeOutput:
    """Outcomes and gains of a prompt share one mean and std; A_k = z(gain_k) + gamma A_{k+1}, A_answer = z(r).

    A tied group's answer turns do not get 0 here: its outcomes differ from the gains they are pooled with.
    """
    group_B_K = tables.group_B[:, None].expand_as(tables.gain_B_K)
    rows = tables.outcome_B.shape[0]
    z = tables.z_score(
        torch.cat([tables.outcome_B, tables.gain_B_K.flatten()]),
        torch.cat([tables.group_B, group_B_K.flatten()]),
        torch.cat([tables.valid_B, tables.has_gain_B_K.flatten()]),
    )
    return _discounted(tables, z[rows:].view_as(tables.gain_B_K), tables.outcome_scale * z[:rows])


def separate(tables: Tables) -> ModeOutput:
    """As `joint`, but a prompt's outcomes and its gains (all turns together) have each their own mean and std."""
    group_B_K = tables.group_B[:, None].expand_as(tables.gain_B_K)
    z = tables.z_score(tables.gain_B_K.flatten(), group_B_K.flatten(), tables.has_gain_B_K.flatten())
    return _discounted(tables, z.view_as(tables.gain_B_K), tables.outcome_advantage())


def turn_group(tables: Tables) -> ModeOutput:
    """Gains scaled to the outcomes' spread, accumulated with the outcome, compared per prompt and turn.

    s     = sigma_out / sigma_gain     (population std of the whole batch, at least sigma_floor each)
    acc_k = s gain_k + gamma acc_{k+1}     (last gain: s gain + gamma^outcome_gamma_power r)
    A_k   = z(acc_k) + outcome_weight R,   A_answer = R
    """
    batch_B = torch.zeros_like(tables.group_B)
    sigma_out = _batch_sigma(tables, tables.outcome_B, batch_B, tables.valid_B)
    batch_N = batch_B.repeat_interleave(tables.gain_B_K.shape[1])
    sigma_gain = _batch_sigma(tables, tables.gain_B_K.flatten(), batch_N, tables.has_gain_B_K.flatten())
    gain_B_K = tables.gain_B_K * (sigma_out / sigma_gain)
    seed_B = tables.gamma ** (tables.outcome_gamma_power - 1) * tables.outcome_B
    acc_B_K = tables.backward(seed_B, lambda k, next_B: gain_B_K[:, k] + tables.gamma * next_B)
    outcome_B = tables.outcome_advantage()
    turn_B_K = tables.z_score_per_turn(acc_B_K) + tables.outcome_weight * outcome_B[:, None]
    return tables.backward(outcome_B, lambda k, _: turn_B_K[:, k]), outcome_B, tables.ones()


def turn_group_v1d(tables: Tables) -> ModeOutput:
    """Gains compared per prompt and turn, discounted sum rescaled by its length, plus the outcome (A2TGPO).

    z_k = z(gain_k),  D_k = sum_{j >= k} gamma^(j-k) z_j over the n_k gains from k on
    A_k = alpha D_k / sqrt(n_k) + R,   A_answer = R,   clip scale_k = 1 + clip_beta (2 sigmoid(z_k) - 1)
    """
    z_B_K = tables.z_score_per_turn(tables.gain_B_K)
    zeros_B = torch.zeros_like(tables.outcome_B)
    sum_B_K = tables.backward(zeros_B, lambda k, next_B: z_B_K[:, k] + tables.gamma * next_B)
    n_B_K = tables.backward(zeros_B, lambda k, next_B: next_B + 1)
    outcome_B = tables.outcome_advantage()
    weight = tables.alpha * tables.gain_scale
    advantage_B_K = weight * sum_B_K / n_B_K.clamp(min=1).sqrt() + outcome_B[:, None]
    scale_B_K = adaptive_clip_scale(z_B_K, tables.clip_beta)
    clip_scale_B_K = tables.backward(torch.ones_like(zeros_B), lambda k, _: scale_B_K[:, k])
    return advantage_B_K, outcome_B, clip_scale_B_K


MODES: dict[str, Callable[[Tables], ModeOutput]] = {
    "none": none,
    "joint": joint,
    "separate": separate,
    "turn-group": turn_group,
    "turn-group-v1d": turn_group_v1d,
    "turn-group-unbiased": turn_group_unbiased,
}

# Modes in which any outcome operator can stand for R; the others normalise outcomes themselves.
ANY_OPERATOR = ("none", "separate", "turn-group-v1d", "turn-group-unbiased")
# Modes that scale the clip range of a turn.
ADAPTIVE = ("turn-group-v1d", "turn-group-unbiased")
# Modes in which adv_rescale_alpha weighs the gains.
RESCALED = ("turn-group-v1d", "turn-group-unbiased")


def _discounted(tables: Tables, z_B_K: torch.Tensor, outcome_B: torch.Tensor) -> ModeOutput:
    z_B_K = tables.gain_scale * z_B_K
    advantage_B_K = tables.backward(outcome_B, lambda k, next_B: z_B_K[:, k] + tables.gamma * next_B)
    return advantage_B_K, outcome_B, tables.ones()


def _batch_sigma(
    tables: Tables, values_N: torch.Tensor, batch_N: torch.Tensor, member_N: torch.Tensor
) -> torch.Tensor:
    """Population std of all members, at least sigma_floor; 1 for one member or none (0-dim)."""
    if not values_N.numel():
        return values_N.new_ones(())
    stats = group_stats(values_N, batch_N, member_N=member_N, ddof=0, variance_floor=0.0)
    return stats.std_N[0].clamp(min=tables.sigma_floor)
