"""X, the estimate of the entropy's gradient, as weights on ∇log q and ∇H of every token.

    f_i = Σ_k H_k                        the entropy of a rollout
    ∇E[f] = E[ Σ_j (G_j - b_j) ∇log q(y_j | s_j) + Σ_k ∇H_k ],   G_j = Σ_{k >= j} H_k        (rb_residual)
    ∇E[-S] = E[ -(S - S̄) ∇S ],   S = Σ_j log q(y_j | s_j)                                   (naive)

``rb_residual`` takes the entropy of each state exactly where ``naive`` takes -log q of the one sampled token; both are
unbiased. The second sum, the pathwise term, belongs to the gradient: without it the estimate is biased (defect E9).

Any function of the state s_j as baseline b_j leaves X unbiased; a good one lowers its variance.
Each baseline predicts the *residual* R_j = G_j - H_j, the return without the present entropy, which s_j determines.
A prediction must not know the token that it is subtracted from: here no prediction for a rollout uses any rollout of the
same prompt. The founding plan updated its mean with a micro-batch and then subtracted it from that micro-batch, which
shrinks a residual that stands alone at its place to a tenth (defects E1, E2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

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
    prompt_B, tokens_B = prompt_numbers(group_B), written_B_T.sum(1).double()
    if settings.x_estimator_mode == "naive":
        entropy_B, numerator, length = _naive(seen, written_B_T, prompt_B)
    else:

        def predicted(residual_B_T: torch.Tensor) -> torch.Tensor:
            return baseline(Targets(residual_B_T, written_B_T, prompt_B, features_B_T_F), settings.baseline)

        entropy_B, numerator, length = _rb_residual(seen, written_B_T, settings.estimand, predicted)
    if not pathwise:
        numerator = replace(numerator, path_B_T=torch.zeros_like(numerator.path_B_T))
    per_token = settings.estimand == PER_TOKEN
    return EntropyGradient(
        entropy_B=entropy_B,
        length_B=tokens_B if per_token else torch.ones_like(tokens_B),
        numerator=numerator,
        length=length if per_token else None,
        prompt_B=prompt_B,
        residual_variance=float(numerator.score_B_T[written_B_T].var(correction=0)),
    )


def _rb_residual(seen: Tokens, written_B_T: torch.Tensor, estimand: str, predicted: Callable):
    """Estimand per sequence: the score is G_j - H_j - μ_j. The mean over a rollout, f = Σ H / T, depends on later tokens in
    each of its terms, through T, so its past does not drop out: the score is f - μ_j, and only whole means are compared
    (E6). ``predicted``: the baseline of residuals."""
    entropy_B_T = torch.where(written_B_T, seen.entropy_B_T, 0.0)
    total_B, path_B_T = entropy_B_T.sum(1), written_B_T.double()
    if estimand == PER_SEQUENCE_MEAN:
        tokens_B = written_B_T.sum(1).double().clamp_min(1)
        total_B, path_B_T = total_B / tokens_B, path_B_T / tokens_B[:, None]
        residual_B_T = torch.where(written_B_T, total_B[:, None], 0.0)
    else:
        residual_B_T = returns_to_go(entropy_B_T, written_B_T) - entropy_B_T
    score_B_T = residual_B_T - predicted(residual_B_T)
    remaining_B_T = returns_to_go(written_B_T.double(), written_B_T) - written_B_T.double()
    length = Surrogate(remaining_B_T - predicted(remaining_B_T), torch.zeros_like(path_B_T))
    return total_B, Surrogate(score_B_T, path_B_T), length


def _naive(seen: Tokens, written_B_T: torch.Tensor, prompt_B: torch.Tensor):
    """Score -(S_i - leave-one-out mean) for every token of the rollout.

    The mean is over the other rollouts of the prompt; where it has one rollout only, over the other prompts. There is no
    naive estimate of the mean over a rollout: E[-S / T] is not E[Σ H / T], because T depends on the sampled tokens.
    """
    log_prob_B_T = torch.where(written_B_T, seen.log_prob_B_T, 0.0)

    def surrogate(value_B: torch.Tensor) -> Surrogate:
        score_B = value_B - leave_one_out_mean(value_B, prompt_B)
        return Surrogate(torch.where(written_B_T, score_B[:, None], 0.0), torch.zeros_like(log_prob_B_T))

    value_B = -log_prob_B_T.sum(1)
    return value_B, surrogate(value_B), surrogate(written_B_T.sum(1).double())


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


@dataclass(frozen=True)
class Targets:
    """The residuals that a baseline is fitted to. ``prompt_B`` counts from 0; only the regression reads features."""

    residual_B_T: torch.Tensor
    written_B_T: torch.Tensor
    prompt_B: torch.Tensor
    features_B_T_F: torch.Tensor | None = None


def baseline(targets: Targets, settings: BaselineSettings) -> torch.Tensor:
    """Predicted residuals [B, T] float64, 0 outside the policy's tokens.

    ``none`` predicts 0, so that b_j = H_j; ``constant`` one number for all places; ``residual_mu`` one number per place.
    """
    written_B_T = targets.written_B_T
    if settings.mode == "none":
        return torch.zeros_like(targets.residual_B_T)
    place_B_T = places(written_B_T) * (settings.mode != "constant")
    if settings.mode == "regression":
        predicted_B_T = _regression(targets, settings)
    elif settings.fit == "leave_one_out":
        predicted_B_T = _leave_one_out(targets, place_B_T)
    else:
        predicted_B_T = _previous(targets, place_B_T, settings.ema_decay)
    return torch.where(written_B_T, predicted_B_T, 0.0)


def places(written_B_T: torch.Tensor) -> torch.Tensor:
    """The number of each token among the policy's own tokens of its row: 0, 1, ...; observations do not count. [B, T]"""
    return (written_B_T.long().cumsum(1) - 1).clamp_min(0)


def _sums(targets: Targets, place_B_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of residuals and number of tokens by prompt and place, [prompts, places]."""
    width = int(place_B_T.max()) + 1
    row_N, column_N = targets.written_B_T.nonzero(as_tuple=True)
    at_N = targets.prompt_B[row_N] * width + place_B_T[row_N, column_N]
    summed = torch.zeros((int(targets.prompt_B.max()) + 1) * width, dtype=torch.float64)
    counted = summed.clone()
    summed.index_add_(0, at_N, targets.residual_B_T[row_N, column_N].double())
    counted.index_add_(0, at_N, torch.ones(len(at_N), dtype=torch.float64))
    return summed.view(-1, width), counted.view(-1, width)


def _leave_one_out(targets: Targets, place_B_T: torch.Tensor) -> torch.Tensor:
    """The mean over all other prompts at this place; where no other prompt gets so far, 0."""
    summed_P_J, counted_P_J = _sums(targets, place_B_T)
    others_P_J, tokens_P_J = summed_P_J.sum(0) - summed_P_J, counted_P_J.sum(0) - counted_P_J
    mean_P_J = torch.where(tokens_P_J > 0, others_P_J / tokens_P_J.clamp_min(1), 0.0)
    return mean_P_J[targets.prompt_B[:, None], place_B_T]


def _previous(targets: Targets, place_B_T: torch.Tensor, decay: float) -> torch.Tensor:
    """The EMA over the prompts before this one. A place's first mean is taken whole; places not reached keep theirs (E3)."""
    summed_P_J, counted_P_J = _sums(targets, place_B_T)
    mu_J, known_J = torch.zeros(summed_P_J.shape[1], dtype=torch.float64), torch.zeros(summed_P_J.shape[1])
    before = []
    for summed_J, counted_J in zip(summed_P_J, counted_P_J, strict=True):
        before.append(mu_J)
        reached_J, mean_J = counted_J > 0, summed_J / counted_J.clamp_min(1)
        moved_J = decay * mu_J + (1 - decay) * mean_J
        mu_J = torch.where(reached_J, torch.where(known_J > 0, moved_J, mean_J), mu_J)
        known_J = torch.maximum(known_J, reached_J.to(known_J))
    return torch.stack(before)[targets.prompt_B[:, None], place_B_T]


def _regression(targets: Targets, settings: BaselineSettings) -> torch.Tensor:
    """Ridge on the standardised state features with an intercept that is not shrunk, fitted to the other folds' prompts.

    β = (ΦᵀΦ + n λ I)⁻¹ Φᵀ(R - mean R), standardised by the rows of the fit. Prompt p is in fold p mod ``folds``.
    Source: phase 3b of the founding plan, which fitted and predicted the same micro-batch, without an intercept.
    """
    if targets.features_B_T_F is None:
        raise ValueError("estimator.baseline.mode=regression needs the features of the states")
    folds = min(settings.folds, int(targets.prompt_B.max()) + 1)
    predicted_B_T = torch.zeros_like(targets.residual_B_T, dtype=torch.float64)
    if folds < 2:
        return predicted_B_T  # no other prompt to fit
    fold_B = targets.prompt_B % folds
    for number in range(folds):
        fitted_B_T = targets.written_B_T & (fold_B != number)[:, None]
        wanted_B_T = targets.written_B_T & (fold_B == number)[:, None]
        x_N_F, y_N = targets.features_B_T_F[fitted_B_T].double(), targets.residual_B_T[fitted_B_T].double()
        if not len(y_N):
            continue
        centre_F, scale_F = x_N_F.mean(0), x_N_F.std(0, correction=0)
        scale_F[scale_F <= 1e-12] = torch.inf  # no weight for a feature that does not vary
        phi_N_F, mean = (x_N_F - centre_F) / scale_F, y_N.mean()
        ridge = settings.ridge_lambda * len(y_N) * torch.eye(phi_N_F.shape[1], dtype=torch.float64)
        beta_F = torch.linalg.solve(phi_N_F.T @ phi_N_F + ridge, phi_N_F.T @ (y_N - mean))
        wanted_N_F = (targets.features_B_T_F[wanted_B_T].double() - centre_F) / scale_F
        predicted_B_T[wanted_B_T] = mean + wanted_N_F @ beta_F
    return predicted_B_T
