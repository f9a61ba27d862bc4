"""Values of turns' states: a ridge regression of returns on features, which has not seen the prompts that it predicts.

A state is what stands before a turn's response. N states in any order, D features each; NaN is a feature without a value.
`prompt_N` is a whole number that states with the same prompt tokens share. All in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from verl_credit.lazy import torch

TURNS, MEAN_TURNS = 8, 3
FAR = 5.0
"""A feature further than this many standard deviations from its mean is taken for that far (`ridge`)."""


@dataclass(frozen=True)
class States:
    """States with the return that followed each; NaN: not known, so that no fit reads the state."""

    x_N_D: torch.Tensor
    return_N: torch.Tensor
    prompt_N: torch.Tensor

    @classmethod
    def joined(cls, parts: Iterable[States]) -> States:
        fields = zip(*(vars(one).values() for one in parts), strict=True)
        return cls(*map(torch.cat, fields))

    def at(self, chosen_N: torch.Tensor) -> States:
        return States(*(one[chosen_N] for one in vars(self).values()))


def connected(prompt_B: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
    """One number for all rows that equal prompts and equal groups connect, the smallest `prompt_B` among them.

    A group's rows have prompts of their own where an environment writes its first observation into the prompt, and one
    question may be drawn into two groups. A fit may hold neither kind of sibling, because each carries the row's outcome.
    """
    part_B, before_B = prompt_B, None
    places = [key_B.unique(return_inverse=True)[1] for key_B in (group_B, prompt_B)]
    while before_B is None or not torch.equal(part_B, before_B):
        before_B = part_B
        for place_B in places:
            part_B = part_B.scatter_reduce(0, place_B, part_B, "amin", include_self=False)[place_B]
    return part_B


def loo_mean(return_B: torch.Tensor, group_B: torch.Tensor, valid_B: torch.Tensor) -> torch.Tensor:
    """Mean return of the prompt's other valid rows whose return is known. The row's own return is in no bit of it.

        m_i = 1 / (n - 1) sum over j != i of G_j,    n - 1 = the others with a known return

    NaN for a row without such others, and for a row that is not valid. The mean of other prompts is no substitute: the own
    return would be among the features of theirs, and so in the fit that predicts the row.
    """
    mean_B = torch.full(return_B.shape, torch.nan, dtype=torch.float64)
    known_B, return_B = return_B.isfinite(), return_B.to(torch.float64).nan_to_num(0.0)
    for group in group_B[valid_B].unique():
        rows_n = (valid_B & (group_B == group)).nonzero().flatten()
        others_n_n = known_B[rows_n].expand(len(rows_n), -1).clone().fill_diagonal_(False)
        mean_B[rows_n] = (others_n_n * return_B[rows_n]).sum(dim=1) / others_n_n.sum(dim=1)
    return mean_B


def group_features(mean_B: torch.Tensor, columns: int) -> torch.Tensor:
    """[B, columns, 12] from the mean m of the row's others and the turn's number k.

    m, m 1(k>0), m 1(k>1), m 1(k>2), 1(k>0), ... 1(k>7)
    """
    after_K1_D = (torch.arange(columns)[:, None] > torch.arange(TURNS)).to(torch.float64)
    weights_K1_D = torch.cat([torch.ones(columns, 1), after_K1_D[:, :MEAN_TURNS]], dim=1).to(torch.float64)
    of_mean_B_K1_D = torch.where(weights_K1_D > 0, mean_B[:, None, None], 0.0)
    return torch.cat([of_mean_B_K1_D, after_K1_D.expand(len(mean_B), -1, -1)], dim=2)


def state_features(
    anchor_B_K1: torch.Tensor,
    return_B_K1: torch.Tensor,
    turn_B_K1: torch.Tensor,
    group_B: torch.Tensor,
    mean_B: torch.Tensor,
) -> torch.Tensor:
    """[B, K1, 5]: what the prompt's other rollouts returned from the state of a turn, and the rollout's own visits before.

        m_s = (sum of G_j(s) over the n_s other rollouts j that came to s + m) / (n_s + 1)
        m_s, min(n_s, 4), m_s 1(n_s > 0), 1(v > 0), v = the rollout's earlier visits of s

    G_j(s) is the return that followed rollout j's first visit of s; a rollout whose return there is not known does not
    count. m is `loo_mean`. Equal ``anchor_B_K1`` are equal states of a prompt; a turn without a state (-1) has NaN. The
    row's own return is in no bit of it.
    """
    x_B_K1_D = torch.full((*anchor_B_K1.shape, 5), torch.nan, dtype=torch.float64)
    at_B_K1, known_B_K1 = turn_B_K1 & (anchor_B_K1 != -1), return_B_K1.isfinite()
    return_B_K1 = return_B_K1.to(torch.float64).nan_to_num(0.0)
    for group in group_B[at_B_K1.any(dim=1)].unique():
        rows_n = ((group_B == group) & at_B_K1.any(dim=1)).nonzero().flatten()
        at_n_K1, anchor_n_K1 = at_B_K1[rows_n], anchor_B_K1[rows_n]
        is_n_K1_S = at_n_K1[:, :, None] & (anchor_n_K1[:, :, None] == anchor_n_K1[at_n_K1].unique())
        visits_n_K1_S = is_n_K1_S.long().cumsum(dim=1) - is_n_K1_S.long()
        counts_n_K1_S = is_n_K1_S & (visits_n_K1_S == 0) & known_B_K1[rows_n, :, None]
        return_n_S = torch.where(counts_n_K1_S, return_B_K1[rows_n, :, None], 0.0).sum(dim=1)
        others_n_n = 1.0 - torch.eye(len(rows_n), dtype=torch.float64)
        number_n_S = others_n_n @ counts_n_K1_S.any(dim=1).to(torch.float64)
        mean_n_S = (others_n_n @ return_n_S + mean_B[rows_n, None]) / (number_n_S + 1)
        of_n_K1 = (torch.arange(len(rows_n))[:, None], is_n_K1_S.long().argmax(dim=2))
        mean_n_K1, number_n_K1 = mean_n_S[of_n_K1], number_n_S[of_n_K1]
        visits_n_K1 = torch.where(is_n_K1_S, visits_n_K1_S, 0).sum(dim=2).to(torch.float64)
        met_n_K1, been_n_K1 = (number_n_K1 > 0).to(torch.float64), (visits_n_K1 > 0).to(torch.float64)
        parts = (mean_n_K1, number_n_K1.clamp(max=4), mean_n_K1 * met_n_K1, been_n_K1, visits_n_K1)
        x_B_K1_D[rows_n] = torch.where(at_n_K1[:, :, None], torch.stack(parts, dim=2), torch.nan)
    return x_B_K1_D


Predict = Callable[[torch.Tensor], torch.Tensor]
"""A fitted function, x_N_D -> V_N."""


def ridge(states: States, shrink: float) -> Predict:
    """The fit with the penalty ``shrink``.

        V(x) = min y <= mean y + z(x) w <= max y,   w = (Z'Z / N + shrink I)^-1 Z'(y - mean y) / N
        z = -FAR <= (x - mean x) / std x <= FAR

    The intercept is not shrunk, and a penalty does not depend on the number of states. A feature without a value is at its
    mean; one that is the same in all states has no weight. A feature that is further than FAR from its mean in some state
    has the mean and std of its middle 98 %, unless these are all equal, so that one state does not hide the others.
    """
    if not shrink > 0:
        raise ValueError(f"shrink={shrink!r}: expected a number above 0, because features may be equal")
    x_N_D, y_N = states.x_N_D, states.return_N
    known_N_D, n = x_N_D.isfinite(), len(y_N)
    mean_D, std_D, moves_D = _moments(x_N_D, known_N_D)
    far_D = moves_D & torch.where(known_N_D, (x_N_D - mean_D).abs() > FAR * std_D, False).any(dim=0)
    if far_D.any():
        # Sorting takes the longest of a fit, so it is left out where no state is far.
        ends_2_D = torch.full((2, len(far_D)), torch.nan, dtype=x_N_D.dtype)
        ends_2_D[:, far_D] = x_N_D[:, far_D].nanquantile(x_N_D.new_tensor([0.01, 0.99]), dim=0)
        inner = _moments(x_N_D, known_N_D & (x_N_D >= ends_2_D[0]) & (x_N_D <= ends_2_D[1]))
        mean_D, std_D = (
            torch.where(far_D & inner[2], *pair) for pair in zip(inner, (mean_D, std_D), strict=False)
        )

    def standardised(x_N_D: torch.Tensor) -> torch.Tensor:
        z_N_D = ((x_N_D - mean_D) / torch.where(moves_D, std_D, 1.0)).clamp(-FAR, FAR)
        return torch.where(x_N_D.isfinite() & moves_D, z_N_D, 0.0)

    z_N_D, mean = standardised(x_N_D), y_N.mean()
    gram_D_D, right_D = z_N_D.T @ z_N_D / n, z_N_D.T @ (y_N - mean) / n
    w_D = torch.linalg.solve(gram_D_D + torch.full_like(right_D, shrink).diag(), right_D)
    return lambda x_N_D: (mean + standardised(x_N_D) @ w_D).clamp(y_N.min(), y_N.max())


def _moments(
    x_N_D: torch.Tensor, counted_N_D: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(mean_D, std_D, whether it is above rounding) of the counted states."""
    count_D = counted_N_D.sum(dim=0).clamp(min=1)
    mean_D = torch.where(counted_N_D, x_N_D, 0.0).sum(dim=0) / count_D
    std_D = (torch.where(counted_N_D, x_N_D - mean_D, 0.0).square().sum(dim=0) / count_D).sqrt()
    return mean_D, std_D, std_D > 1e-9 * (1 + mean_D.abs())


def crossfit(
    states: States,
    replay: States | None,
    mean_N: torch.Tensor,
    *,
    shrink: float,
    folds: int,
    part_N: torch.Tensor | None = None,
) -> tuple[torch.Tensor, int]:
    """(value_N, number of states with a known return), each value from a fit without any state of its part or prompt.

    ``part_N``: `connected` rows have one number; None: the rows of a prompt are a part. The distinct numbers, in their
    order, are dealt out to ``folds`` folds in turn, so that neither the order of the rows nor an outcome decides. All of
    ``replay`` but the fold's own prompts joins each fit. Where no other state has a known return, V is ``mean_N``, the mean
    return of the row's others, or 0 where that is NaN.
    """
    pool = states if replay is None else States.joined([states, replay])
    value_N, known_M = mean_N.nan_to_num(0.0), pool.return_N.isfinite()
    part_N = states.prompt_N if part_N is None else part_N
    parts = part_N.unique()  # sorted
    for fold in range(min(folds, len(parts))):
        own_N = torch.isin(part_N, parts[fold::folds])
        fit_M = known_M & ~torch.isin(pool.prompt_N, states.prompt_N[own_N])
        if fit_M.any():
            value_N[own_N] = ridge(pool.at(fit_M), shrink)(states.at(own_N).x_N_D)
    return value_N, int(known_M.sum())


def explained_variance(value_N: torch.Tensor, return_N: torch.Tensor) -> float | None:
    """The share of the returns' variance that values explain; None where returns do not differ.

        EV = 1 - mean (G - V)^2 / var G

    G has the noise of one rollout, so that the true values have an EV below 1. Below 0: the mean return is a better guess.
    """
    known_N = return_N.isfinite()
    return_n, value_n = return_N[known_N], value_N[known_N]
    if not len(return_n) or return_n.amax() == return_n.amin():
        return None
    return 1 - float((return_n - value_n).square().mean() / return_n.var(correction=0))


def explained_variance_of_changes(
    value_B_K1: torch.Tensor, return_B_K1: torch.Tensor, turn_B_K1: torch.Tensor, gamma: float = 1.0
) -> float | None:
    """How much less a state leaves open than the state before it, over all neighbours of a row; None without any.

        EV = 1 - sum gamma^2 (G_(k+1) - V_(k+1))^2 / sum (G_k - V_k)^2

    Both errors are of the same return: G_k - r_k - gamma V_(k+1) = gamma (G_(k+1) - V_(k+1)). 0: the change V_(k+1) - V_k
    says nothing of the outcome that V_k did not say; below 0: it misleads, and advantages at a small lam are noise. With
    true values at gamma 1 it is E (V_(k+1) - V_k)^2 / E (G_k - V_k)^2. A turn reward that was earned between the two states
    is known in the later one, and counts.
    """
    error_B_K1 = return_B_K1 - value_B_K1
    pair_B_K = turn_B_K1[:, :-1] & turn_B_K1[:, 1:] & (error_B_K1[:, :-1] + error_B_K1[:, 1:]).isfinite()
    open_p, left_p = error_B_K1[:, :-1][pair_B_K], gamma * error_B_K1[:, 1:][pair_B_K]
    if not open_p.any():
        return None
    return 1 - float(left_p.square().sum() / open_p.square().sum())
