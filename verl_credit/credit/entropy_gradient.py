"""X, the estimate of the entropy's gradient, as weights on ∇log q and ∇H of every token.

    f_i = Σ_k H_k                        the entropy of a rollout
    ∇E[f] = E[ Σ_j (G_j - b_j) ∇log q(y_j | s_j) + Σ_k ∇H_k ],   G_j = Σ_{k >= j} H_k

The entropy of each state is taken exactly, not as -log q of the one sampled token. The second sum, the pathwise term,
belongs to the gradient: without it the estimate is biased.

Any function of the state s_j as baseline b_j leaves X unbiased. Here b_j = H_j + μ_j, where μ_j predicts the *residual*
R_j = G_j - H_j, the return without the present entropy, which s_j determines. A prediction must not know the token that it
is subtracted from: no prediction for a rollout uses any rollout of the same prompt. A mean that holds the sample it is
subtracted from shrinks a residual that stands alone at its place.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_credit.lazy import torch


@dataclass(frozen=True)
class Tokens:
    """log q(y_j | s_j) and H_j per token, [B, T]; or their derivatives along a direction."""

    log_prob_B_T: torch.Tensor
    entropy_B_T: torch.Tensor


@dataclass(frozen=True)
class Surrogate:
    """Σ_j score_j log q_j + path_j H_j per rollout: its gradient at the sampling parameters is the estimate."""

    score_B_T: torch.Tensor
    path_B_T: torch.Tensor

    def along(self, derivative: Tokens) -> torch.Tensor:
        """The directional derivative per rollout, [B]."""
        weighted_B_T = self.score_B_T * derivative.log_prob_B_T + self.path_B_T * derivative.entropy_B_T
        return weighted_B_T.sum(1)


@dataclass(frozen=True)
class EntropyGradient:
    """X of all rollouts. ``entropy_B`` is f_i, ``length_B`` its number of tokens T_i.

    H = E[f] / E[T], nats per token, is a ratio, so ∇H = (∇E[f] - H ∇E[T]) / E[T]: ``length`` is the surrogate of ∇E[T].
    """

    entropy_B: torch.Tensor
    length_B: torch.Tensor
    numerator: Surrogate
    length: Surrogate
    prompt_B: torch.Tensor

    @property
    def per_token(self) -> float:
        """H̄, by means over prompts of means over their rollouts."""
        weight_B = self.row_weight_B
        return float((weight_B * self.entropy_B).sum() / (weight_B * self.length_B).sum())

    @property
    def row_weight_B(self) -> torch.Tensor:
        """1 / (prompts x rollouts of the row's prompt)."""
        rows_P = torch.bincount(self.prompt_B)
        return 1 / (len(rows_P) * rows_P[self.prompt_B].double())

    def combined(self) -> Surrogate:
        """Returns the surrogate whose gradient, summed over rows, is X̄."""
        weight_B_1 = self.row_weight_B[:, None]
        score_B_T = self.numerator.score_B_T - self.per_token * self.length.score_B_T
        mean_length = (self.row_weight_B * self.length_B).sum()
        path_B_T = self.numerator.path_B_T
        return Surrogate(weight_B_1 * score_B_T / mean_length, weight_B_1 * path_B_T / mean_length)


def entropy_gradient(seen: Tokens, written_B_T: torch.Tensor, group_B: torch.Tensor) -> EntropyGradient:
    """Returns the weights of X from log-probs and entropies at the sampling parameters, all rows at once.

    Weights are made from the whole batch before any backward pass, so that nothing depends on micro-batches. A row without
    a written token has weight 0. Raises ValueError if no row has a written token.
    """
    if not written_B_T.any():
        raise ValueError(f"the policy wrote no token in any of the {len(written_B_T)} rollouts")
    prompt_B, one_B_T = prompt_numbers(group_B), written_B_T.double()
    entropy_B_T = torch.where(written_B_T, seen.entropy_B_T, 0.0)
    score_B_T, left_B_T = (
        residual_B_T - predicted(residual_B_T, written_B_T, prompt_B)
        for residual_B_T in (returns_to_go(x_B_T, written_B_T) - x_B_T for x_B_T in (entropy_B_T, one_B_T))
    )
    return EntropyGradient(
        entropy_B=entropy_B_T.sum(1),
        length_B=one_B_T.sum(1),
        numerator=Surrogate(score_B_T, one_B_T),
        length=Surrogate(left_B_T, torch.zeros_like(one_B_T)),
        prompt_B=prompt_B,
    )


def returns_to_go(value_B_T: torch.Tensor, written_B_T: torch.Tensor) -> torch.Tensor:
    """G_j = Σ_{k >= j} value_k over the policy's tokens, 0 elsewhere. [B, T] float64.

    Example: entropies (1, .5, .25) give (1.75, .75, .25).
    """
    kept_B_T = torch.where(written_B_T, value_B_T.double(), 0.0)
    return torch.where(written_B_T, kept_B_T.flip(1).cumsum(1).flip(1), 0.0)


def predicted(residual_B_T: torch.Tensor, written_B_T: torch.Tensor, prompt_B: torch.Tensor) -> torch.Tensor:
    """Returns μ, the predicted residuals [B, T] float64, 0 outside the policy's tokens.

    A prediction is the mean of all other prompts at the same place, and 0 where no other prompt gets so far.
    """
    place_B_T = places(written_B_T)
    width = int(place_B_T.max()) + 1
    row_N, column_N = written_B_T.nonzero(as_tuple=True)
    at_N = prompt_B[row_N] * width + place_B_T[row_N, column_N]
    summed = torch.zeros((int(prompt_B.max()) + 1) * width, dtype=torch.float64)
    counted = summed.clone()
    summed.index_add_(0, at_N, residual_B_T[row_N, column_N].double())
    counted.index_add_(0, at_N, torch.ones(len(at_N), dtype=torch.float64))
    summed_P_J, counted_P_J = summed.view(-1, width), counted.view(-1, width)
    others_P_J, tokens_P_J = summed_P_J.sum(0) - summed_P_J, counted_P_J.sum(0) - counted_P_J
    mean_P_J = torch.where(tokens_P_J > 0, others_P_J / tokens_P_J.clamp_min(1), 0.0)
    return torch.where(written_B_T, mean_P_J[prompt_B[:, None], place_B_T], 0.0)


def places(written_B_T: torch.Tensor) -> torch.Tensor:
    """The number of each token among the policy's own tokens of its row: 0, 1, ...; observations do not count. [B, T]"""
    return (written_B_T.long().cumsum(1) - 1).clamp_min(0)


def prompt_numbers(group_B: torch.Tensor) -> torch.Tensor:
    """Groups renumbered 0, 1, ... in the order of their first row."""
    number = {group: i for i, group in enumerate(dict.fromkeys(group_B.tolist()))}
    return torch.tensor([number[group] for group in group_B.tolist()])


def mean_by_prompt(value_B: torch.Tensor, prompt_B: torch.Tensor) -> torch.Tensor:
    """Mean over each prompt's rollouts, [prompts] float64. ``prompt_B`` as `prompt_numbers` gives it."""
    rows_P = torch.bincount(prompt_B)
    return torch.zeros(len(rows_P), dtype=torch.float64).index_add(0, prompt_B, value_B.double()) / rows_P
