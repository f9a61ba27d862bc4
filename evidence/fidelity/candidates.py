"""Turn credit that was tried and has not won (README.md, "Candidates"). A mode of one's own is such a function:

cd evidence/fidelity && verl-credit bench candidates:turn_price
"""

import torch

from verl_credit.credit.groups import minus_others
from verl_credit.credit.turn.mode import ModeOutput
from verl_credit.credit.turn.modes.gigpo import gigpo
from verl_credit.credit.turn.tables import Tables


def turn_price(tables: Tables, *, shrink: float = 0.5, ridge: float = 1.0) -> ModeOutput:
    """r - m = w (n - n') + e          over the rows of a batch; m, n': the means of the prompt's other trajectories
    A_k = w (G_k - G'_k) + shrink e,   G_k: turns that search from k on, G'_k: the others' mean

    What one more search is worth is fitted to the batch's other prompts (ridge regression), so that a row does not enter its
    own w. The rest of the outcome, which says little about any one turn, is made smaller. At shrink 1, A_k is r - m less w
    times what was searched before k (less the others' mean of that).
    """
    searches_B_K1 = (tables.turn_B_K1 & ~tables.is_answer_B_K1).to(torch.float64)
    to_go_B_K1 = tables.return_to_go(searches_B_K1, 1.0)
    columns = [minus_others(g_B, tables.group_B, tables.valid_B) for g_B in to_go_B_K1.unbind(1)]
    more_B_K1 = torch.stack(columns, dim=1)
    better_B, more_B = minus_others(tables.outcome_B, tables.group_B, tables.valid_B), more_B_K1[:, 0]
    w_B = _slope_elsewhere(more_B, better_B, tables.group_B, ridge)
    rest_B = better_B - w_B * more_B
    return *tables.split(w_B[:, None] * more_B_K1 + shrink * rest_B[:, None]), tables.ones()


turn_price.scope = "batch"
turn_price.properties = ("centred",)


def _slope_elsewhere(
    x_B: torch.Tensor, y_B: torch.Tensor, group_B: torch.Tensor, ridge: float
) -> torch.Tensor:
    """sum x y / (sum x^2 + ridge) over the rows of all other prompts."""
    mixed_G = x_B.new_zeros(len(x_B)).index_add(0, group_B, x_B * y_B)
    square_G = x_B.new_zeros(len(x_B)).index_add(0, group_B, x_B * x_B)
    return ((mixed_G.sum() - mixed_G) / (square_G.sum() - square_G + ridge))[group_B]


def fitted_gae(tables: Tables, *, lam: float = 0.5, ridge: float = 1.0) -> ModeOutput:
    """V_k = m + w . x_k,   delta_k = V_{k+1} - V_k (the answer's: r - V_k),   A_k = delta_k + lam A_{k+1}

    x_k = (1, m, [k>0], [k>1], [k>2], [k>0] m, [k>1] m, c_k, g_{k-1}, c_k m): m as above, c_k what the turns before k earned
    (information gain), g_{k-1} what the last of them earned. w: ridge regression of r - m over the batch's other prompts. So
    a gain is evidence of the outcome, weighed by what it was evidence of elsewhere, and no reward of its own. Unbiased for r
    at lam 1; below, the bias is that of V.
    """
    better_B = minus_others(tables.outcome_B, tables.group_B, tables.valid_B)
    x_B_K1_D = _features(tables, tables.outcome_B - better_B)
    y_B_K1 = torch.where(tables.turn_B_K1, better_B[:, None], 0.0)
    width, rows = x_B_K1_D.shape[-1], len(better_B)
    square_G_D_D = x_B_K1_D.new_zeros(rows, width, width)
    square_G_D_D.index_add_(0, tables.group_B, torch.einsum("bkd,bke->bde", x_B_K1_D, x_B_K1_D))
    mixed_G_D = x_B_K1_D.new_zeros(rows, width)
    mixed_G_D.index_add_(0, tables.group_B, torch.einsum("bkd,bk->bd", x_B_K1_D, y_B_K1))
    prior_D_D = ridge * torch.eye(width, dtype=x_B_K1_D.dtype)
    w_G_D = torch.linalg.solve(square_G_D_D.sum(0) - square_G_D_D + prior_D_D, mixed_G_D.sum(0) - mixed_G_D)
    fitted_B_K1 = torch.einsum("bkd,bd->bk", x_B_K1_D, w_G_D[tables.group_B])
    next_B_K1 = torch.nn.functional.pad(fitted_B_K1[:, 1:], (0, 1))
    next_B_K1 = torch.where(tables.is_answer_B_K1, better_B[:, None], next_B_K1)
    delta_B_K1 = torch.where(tables.turn_B_K1, next_B_K1 - fitted_B_K1, 0.0)
    return *tables.split(tables.return_to_go(delta_B_K1, lam)), tables.ones()


fitted_gae.scope = "batch"
fitted_gae.properties = ()
fitted_gae.exempt = dict.fromkeys(("ties", "no_gains"), "its baseline is fitted to other prompts")


def gigpo_half_negative(tables: Tables) -> ModeOutput:
    """A_k = a_k where a_k > 0, else a_k / 2          a_k: `gigpo` with its defaults

    Turns that look worse than others from their state count half, as outcomes below the mean do in ``half_negative``.
    """
    advantage_B_K, outcome_B, scale_B_K = gigpo(tables)
    halved = [torch.where(a > 0, a, a / 2) for a in (advantage_B_K, outcome_B)]
    return *halved, scale_B_K


gigpo_half_negative.reads = ("rewards", "groups", "gains", "anchors")
gigpo_half_negative.needs = ("anchor_B_K1",)
gigpo_half_negative.default_signal = "none"
gigpo_half_negative.whole_returns = True
gigpo_half_negative.exempt = dict.fromkeys(("ties", "better_tools", "no_gains"), "as gigpo")


def _features(tables: Tables, others_B: torch.Tensor) -> torch.Tensor:
    earned_B_K = torch.where(tables.has_reward_B_K, tables.reward_B_K, 0.0)
    last_B_K1 = torch.nn.functional.pad(earned_B_K, (1, 0))
    before_B_K1 = last_B_K1.cumsum(dim=1)
    others_B_K1 = others_B[:, None].expand_as(before_B_K1)
    turn_K1 = torch.arange(before_B_K1.shape[1])
    beyond = [(turn_K1 > k).to(torch.float64).expand_as(before_B_K1) for k in range(3)]
    features = (
        torch.ones_like(before_B_K1), others_B_K1, *beyond, beyond[0] * others_B_K1, beyond[1] * others_B_K1,
        before_B_K1, last_B_K1, before_B_K1 * others_B_K1,
    )  # fmt: skip
    return torch.where(tables.turn_B_K1[..., None], torch.stack(features, dim=-1), 0.0)
