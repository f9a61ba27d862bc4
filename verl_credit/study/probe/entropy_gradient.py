"""X, the estimate of the entropy's gradient, as weights on ∇log q and ∇H of every token.

    f_i = Σ_k H_k                        the entropy of a rollout
    ∇E[f] = E[ Σ_j (G_j - b_j) ∇log q(y_j | s_j) + Σ_k ∇H_k ],   G_j = Σ_{k >= j} H_k        (rb_residual)
    ∇E[-S] = E[ -(S - S̄) ∇S ],   S = Σ_j log q(y_j | s_j)                                   (naive)

``rb_residual`` takes the entropy of each state exactly where ``naive`` takes -log q of the one sampled token; both are
unbiased. The second sum, the pathwise term, belongs to the gradient: without it the estimate is biased (defect E9).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from verl_credit.study.probe.baselines import Targets, baseline
from verl_credit.study.probe.policy import Tokens
from verl_credit.study.probe.rollouts import prompt_numbers
from verl_credit.study.probe.settings import PER_SEQUENCE_MEAN, PER_TOKEN, BaselineSettings, EstimatorSettings


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
    """X of all rollouts. ``entropy_B`` is f_i by the estimator, ``length_B`` its T_i (1 unless per token).

    Per token, H = E[f] / E[T] is a ratio, so ∇H = (∇E[f] - H ∇E[T]) / E[T]: ``length`` is the surrogate of ∇E[T]. The
    released code lacked that term until its last weeks, and compared an estimate without it to a change with it.
    """

    entropy_B: torch.Tensor
    length_B: torch.Tensor
    numerator: Surrogate
    length: Surrogate | None
    prompt_B: torch.Tensor
    residual_variance: float
    """variance over tokens of what multiplies the score"""

    @property
    def per_token(self) -> float:
        """H̄, or the mean entropy of a rollout: means over prompts of means over their rollouts."""
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
        score_B_T, path_B_T = self.numerator.score_B_T, self.numerator.path_B_T
        if self.length is not None:
            score_B_T = score_B_T - self.per_token * self.length.score_B_T
        mean_length = (self.row_weight_B * self.length_B).sum()
        return Surrogate(weight_B_1 * score_B_T / mean_length, weight_B_1 * path_B_T / mean_length)


def entropy_gradient(
    seen: Tokens,
    written_B_T: torch.Tensor,
    group_B: torch.Tensor,
    settings: EstimatorSettings,
    features_B_T_F: torch.Tensor | None = None,
    *,
    pathwise: bool = True,
) -> EntropyGradient:
    """The weights of X from log-probs and entropies at the sampling parameters, all rows at once.

    Nothing here depends on micro-batches: weights are made from the whole batch before any backward pass (the released code
    made them per micro-batch and multiplied by its prompts, defect E5). A row without a written token has weight 0.
    ``pathwise=False`` leaves ∇H out, which biases the estimate. ValueError if no row has a written token.
    """
    if not written_B_T.any():
        raise ValueError(f"the policy wrote no token in any of the {len(written_B_T)} rollouts")
    tokens_B = written_B_T.sum(1).double()
    where = _Where(written_B_T, prompt_numbers(group_B), tokens_B, features_B_T_F)
    make = {"naive": _naive, "rb_residual": _rb_residual}[settings.x_estimator_mode]
    entropy_B, numerator, length = make(seen, where, settings)
    if settings.estimand != PER_TOKEN:
        length = None
    if not pathwise:
        numerator = replace(numerator, path_B_T=torch.zeros_like(numerator.path_B_T))
    return EntropyGradient(
        entropy_B=entropy_B,
        length_B=tokens_B if length is not None else torch.ones_like(tokens_B),
        numerator=numerator,
        length=length,
        prompt_B=where.prompt_B,
        residual_variance=float(numerator.score_B_T[written_B_T].var(correction=0)),
    )


@dataclass(frozen=True)
class _Where:
    written_B_T: torch.Tensor
    prompt_B: torch.Tensor
    tokens_B: torch.Tensor
    features_B_T_F: torch.Tensor | None

    def predicted(self, residual_B_T: torch.Tensor, settings: BaselineSettings) -> torch.Tensor:
        return baseline(Targets(residual_B_T, self.written_B_T, self.prompt_B, self.features_B_T_F), settings)

    def spread(self, value_B: torch.Tensor) -> torch.Tensor:
        return torch.where(self.written_B_T, value_B[:, None], 0.0)


def _rb_residual(seen: Tokens, where: _Where, settings: EstimatorSettings):
    """Estimand per sequence: the score is G_j - H_j - μ_j. The mean over a rollout, f = Σ H / T, depends on later tokens in
    each of its terms, through T, so its past does not drop out: the score is f - μ_j, and only whole means are compared
    (E6)."""
    written_B_T, entropy_B_T = where.written_B_T, torch.where(where.written_B_T, seen.entropy_B_T, 0.0)
    total_B = entropy_B_T.sum(1)
    path_B_T = written_B_T.double()
    if settings.estimand == PER_SEQUENCE_MEAN:
        mean_B = total_B / where.tokens_B.clamp_min(1)
        residual_B_T = where.spread(mean_B)
        path_B_T = path_B_T / where.tokens_B.clamp_min(1)[:, None]
        total_B = mean_B
    else:
        residual_B_T = returns_to_go(entropy_B_T, written_B_T) - entropy_B_T
    score_B_T = residual_B_T - where.predicted(residual_B_T, settings.baseline)
    remaining_B_T = returns_to_go(written_B_T.double(), written_B_T) - written_B_T.double()
    length = Surrogate(
        remaining_B_T - where.predicted(remaining_B_T, settings.baseline), torch.zeros_like(path_B_T)
    )
    return total_B, Surrogate(score_B_T, path_B_T), length


def _naive(seen: Tokens, where: _Where, settings: EstimatorSettings):
    """Score -(S_i - leave-one-out mean) for every token of the rollout.

    The mean is over the other rollouts of the prompt; where it has one rollout only, over the other prompts. There is no
    naive estimate of the mean over a rollout: E[-S / T] is not E[Σ H / T], because T depends on the sampled tokens.
    """
    log_prob_B_T = torch.where(where.written_B_T, seen.log_prob_B_T, 0.0)
    value_B = -log_prob_B_T.sum(1)
    score_B = value_B - leave_one_out_mean(value_B, where.prompt_B)
    length_B = where.tokens_B - leave_one_out_mean(where.tokens_B, where.prompt_B)
    nothing_B_T = torch.zeros_like(log_prob_B_T)
    return (
        value_B,
        Surrogate(where.spread(score_B), nothing_B_T),
        Surrogate(where.spread(length_B), nothing_B_T),
    )


def returns_to_go(value_B_T: torch.Tensor, written_B_T: torch.Tensor) -> torch.Tensor:
    """G_j = Σ_{k >= j} value_k over the policy's tokens, 0 elsewhere. [B, T] float64.

    Example: entropies (1, .5, .25) give (1.75, .75, .25).
    """
    kept_B_T = torch.where(written_B_T, value_B_T.double(), 0.0)
    return torch.where(written_B_T, kept_B_T.flip(1).cumsum(1).flip(1), 0.0)


def leave_one_out_mean(value_B: torch.Tensor, prompt_B: torch.Tensor) -> torch.Tensor:
    """The mean of the other rollouts of the row's prompt; for a prompt with one rollout, of all other prompts' rollouts."""
    rows_P = torch.bincount(prompt_B).double()
    summed_P = torch.zeros_like(rows_P).index_add(0, prompt_B, value_B)
    siblings_B = (summed_P[prompt_B] - value_B) / (rows_P[prompt_B] - 1).clamp_min(1)
    others_B = (summed_P.sum() - summed_P[prompt_B]) / (rows_P.sum() - rows_P[prompt_B]).clamp_min(1)
    return torch.where(rows_P[prompt_B] > 1, siblings_B, others_B)
