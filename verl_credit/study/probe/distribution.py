"""The distribution that tokens are sampled from: log-prob and entropy of one and the same q, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

HEAD = 5


@dataclass(frozen=True)
class Sampling:
    """Temperature and nucleus of the rollouts. Errors: ValueError with the field, its value and what would be right."""

    temperature: float = 1.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise ValueError(
                f"temperature={self.temperature!r}: expected a number above 0, because greedy decoding has no entropy"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p!r}: expected a number in (0, 1]")


def scaled_and_kept(
    logits_N_V: torch.Tensor, sampling: Sampling, sampled_N_V: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """a = z / T in float64, and which tokens the nucleus keeps (None: all of them).

    Tokens in descending probability are kept while the mass *before* them is below top_p, so the token that crosses it is
    kept, as samplers do. The nucleus is that of ``sampled_N_V`` where given, the logits that the tokens were sampled from.
    It is a constant of the gradient and of a step: where it changes the entropy jumps, and no rollout has the new tokens.
    """
    scaled_N_V = logits_N_V.double() / sampling.temperature
    if sampling.top_p == 1:
        return scaled_N_V, None
    of_N_V = scaled_N_V if sampled_N_V is None else sampled_N_V.double() / sampling.temperature
    ordered_N_V, order_N_V = of_N_V.detach().softmax(-1).sort(dim=-1, descending=True, stable=True)
    before_N_V = ordered_N_V.cumsum(-1) - ordered_N_V
    kept_N_V = torch.zeros_like(before_N_V, dtype=torch.bool)
    return scaled_N_V, kept_N_V.scatter(-1, order_N_V, before_N_V < sampling.top_p)


def log_prob_and_entropy(
    logits_N_V: torch.Tensor,
    token_N: torch.Tensor,
    sampling: Sampling,
    sampled_N_V: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log q(token) and H(q) = logsumexp_S(a) - Σ_S q a, both float64 [N], differentiable in both modes.

    q is softmax(logits / T) renormalised on the nucleus S. The released probe took H of q and the score of the raw softmax:
    the two then belong to different policies, and E[∇log q] = 0 holds for neither of them together (defect E7).
    ``sampled_N_V``: the logits whose nucleus is meant; default: ``logits_N_V`` itself.

    Errors: ValueError for a sampled token that the nucleus excludes, with its place and its probability.
    """
    scaled_N_V, kept_N_V = scaled_and_kept(logits_N_V, sampling, sampled_N_V)
    if kept_N_V is None:
        log_q_N_V = scaled_N_V.log_softmax(-1)
        entropy_N = -(log_q_N_V.exp() * log_q_N_V).sum(-1)
        return log_q_N_V.gather(-1, token_N[:, None]).squeeze(-1), entropy_N
    _refuse_excluded(scaled_N_V, kept_N_V, token_N, sampling)
    log_q_N_V = scaled_N_V.masked_fill(~kept_N_V, -math.inf).log_softmax(-1)
    finite_N_V = log_q_N_V.masked_fill(~kept_N_V, 0.0)
    entropy_N = -(finite_N_V.exp() * kept_N_V * finite_N_V).sum(-1)
    return finite_N_V.gather(-1, token_N[:, None]).squeeze(-1), entropy_N


def _refuse_excluded(scaled_N_V, kept_N_V, token_N, sampling: Sampling) -> None:
    out_N = ~kept_N_V.gather(-1, token_N[:, None]).squeeze(-1)
    if not out_N.any():
        return
    place = int(out_N.nonzero()[0])
    token = int(token_N[place])
    p = float(scaled_N_V[place].detach().softmax(-1)[token])
    raise ValueError(
        f"top_p={sampling.top_p} excludes {int(out_N.sum())} sampled tokens, for example token {token} with probability "
        f"{p:.3g}: the rollouts were sampled with another top_p, temperature or other weights"
    )


def state_features(logits_N_V: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The features of a state that the regression baseline reads beside the place, [N, 6] detached float64.

    The columns: entropy of q; largest probability; its distance from the second; mass of the five largest; entropy of
    (top1, 1 - top1); variance of the scaled logits under q.
    """
    with torch.no_grad():
        scaled_N_V, kept_N_V = scaled_and_kept(logits_N_V, sampling)
        if kept_N_V is not None:
            scaled_N_V = scaled_N_V.masked_fill(~kept_N_V, -math.inf)
        q_N_V = scaled_N_V.softmax(-1)
        head_N_H = q_N_V.topk(min(HEAD, q_N_V.shape[-1]), -1).values
        top_N = head_N_H[:, 0]
        second_N = head_N_H[:, 1] if head_N_H.shape[1] > 1 else torch.zeros_like(top_N)
        finite_N_V = scaled_N_V.masked_fill(q_N_V == 0, 0.0)
        mean_N_1 = (q_N_V * finite_N_V).sum(-1, keepdim=True)
        columns = (
            torch.special.entr(q_N_V).sum(-1),
            top_N,
            top_N - second_N,
            head_N_H.sum(-1),
            torch.special.entr(top_N) + torch.special.entr((1 - top_N).clamp_min(0)),
            (q_N_V * (finite_N_V - mean_N_1).square()).sum(-1),
        )
        return torch.stack(columns, -1)
