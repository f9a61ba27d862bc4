"""A whole probe: the update's direction, the prediction, the change itself, and how the estimators compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from scipy.stats import t as student_t
from torch import nn

from verl_credit.study.probe.change import entropy_change, log_log_slope, predict, u_statistic
from verl_credit.study.probe.entropy_gradient import EntropyGradient, entropy_gradient, places
from verl_credit.study.probe.policy import (
    ModelPolicy,
    Parameters,
    Sampling,
    Tokens,
    along,
    dot,
    gradient,
    moved,
    norm,
    observe,
    observe_features,
)
from verl_credit.study.probe.rollouts import Rollouts
from verl_credit.study.probe.settings import (
    ESTIMANDS,
    PER_SEQUENCE_MEAN,
    BaselineSettings,
    EstimatorSettings,
    ProbeSettings,
)
from verl_credit.study.probe.update import (
    OptimizerState,
    adamw_step,
    credit_weights,
    diagonal_step,
    outcome_weights,
)


@dataclass(frozen=True)
class Objective:
    """The run's own configuration of its update. ``tokens``: the longest response that it allows."""

    loss_agg_mode: str
    loss_scale_factor: float | None
    max_grad_norm: float | None
    tokens: int


@dataclass(frozen=True)
class Probe:
    """Everything that one probe reads. E and U must not share a prompt: ValueError."""

    model: nn.Module
    e: Rollouts
    u: Rollouts
    sampling: Sampling
    optimizer: OptimizerState
    objective: Objective
    settings: ProbeSettings
    say: Callable[[float, str], None] = lambda share, text: None
    """(share that is done, name of the stage)"""

    def __post_init__(self) -> None:
        shared = set(self.e.group_B.tolist()) & set(self.u.group_B.tolist())
        if shared:
            why = f"for example prompt {min(shared)}: a rollout that makes the update must not measure it"
            raise ValueError(f"E and U share {len(shared)} prompts, {why}")

    @property
    def micro_batch(self) -> int:
        return self.settings.runtime.micro_batch

    @property
    def lr(self) -> float:
        return self.settings.update.lr or self.optimizer.lr

    def measure(self) -> dict[str, Any]:
        """The probe's result, as JSON holds it. docs/probe.md explains every entry."""
        e_policy = ModelPolicy(self.model, self.e, self.sampling)
        # The loss of the update divides logits by the temperature and has no nucleus.
        u_policy = ModelPolicy(self.model, self.u, Sampling(self.sampling.temperature))
        y_gradient, direction = self._direction(u_policy)
        seen = self._observe(e_policy, "X: log-probs and entropies")
        features = self._features(e_policy)
        x = self._x(self.e, seen, features, self.settings.estimator)
        tick = self._tick("δH₁: derivatives along the update", len(self.e))
        derivative = along(e_policy, direction, len(self.e), self.micro_batch, tick)
        prediction = predict(x, derivative)
        x_dot, norms = self._by_gradients(e_policy, x, direction)
        norms |= {"y_gradient": norm(y_gradient), "y_step": norm(direction)}
        value, se = prediction.at(self.lr)
        # The jackknife over P prompts has P - 1 degrees of freedom; nan for P = 1.
        half = float(student_t.ppf(0.975, len(self.e.prompts) - 1)) * se
        truth = [self._truth(e_policy, seen, direction, prediction, at) for at in self.settings.truth.etas]
        changes = [row["change"] for row in truth]
        return {
            "settings": self.settings.model_dump(),
            "in_use": self.settings.banner(),
            "unbiased": self.settings.generation.rb_requires_grad,
            "unit": ESTIMANDS[self.settings.estimator.estimand],
            "sampling": asdict(self.sampling),
            "e": _size(self.e),
            "u": _size(self.u),
            "lr": self.lr,
            "entropy": prediction.entropy,
            "delta_h1": {
                "value": value,
                "se": se,
                "conditional_se": self.lr * prediction.conditional_se,
                "interval_95": [value - half, value + half],
                "by_dot_product": self.lr * x_dot,
            },
            "norms": norms,
            "derivative_check": self._derivative_check(e_policy, derivative, direction),
            "truth": truth,
            "log_log_slope": log_log_slope([row["eta"] for row in truth], changes) if all(changes) else None,
            "estimators": list(self._estimators(seen, features, derivative)),
            "u_statistic": self._u_statistic() if self.settings.update.step == "diagonal" else None,
        }

    def _tick(self, text: str, total: int) -> Callable[[int], None]:
        """Returns a function that reports the progress of a stage."""
        done = 0

        def tick(more: int) -> None:
            nonlocal done
            done += more
            self.say(done / total, text)

        self.say(0.0, text)
        return tick

    def _observe(self, policy: ModelPolicy, text: str, parameters: Parameters | None = None) -> Tokens:
        tick = self._tick(text, len(self.e))
        return observe(policy, len(self.e), self.micro_batch, parameters, tick)

    def _weights(self, u: Rollouts) -> torch.Tensor:
        if self.settings.update.objective == "outcome":
            return outcome_weights(u, self.objective.tokens)
        o = self.objective
        return credit_weights(u, o.loss_agg_mode, o.loss_scale_factor, o.tokens)

    def _direction(self, policy: ModelPolicy) -> tuple[Parameters, Parameters]:
        """(gradient of the loss, δθ per unit of learning rate)."""
        weight_B_T = self._weights(self.u)
        if not weight_B_T.any():
            why = "every advantage in U is 0 (all rollouts of each prompt have the same reward)"
            use = "so there is no update to probe; take more prompts (batch_config.B_U)"
            raise ValueError(f"update.objective={self.settings.update.objective}: {why}, {use}")
        tick = self._tick("Y: the gradient of the loss", len(self.u))
        y = gradient(policy, weight_B_T, torch.zeros_like(weight_B_T), self.micro_batch, tick=tick)
        if self.settings.update.step == "diagonal":
            return y, diagonal_step(y, self.optimizer)
        clip = self.objective.max_grad_norm
        return y, adamw_step(policy.parameters, y, self.optimizer, max_grad_norm=clip)

    def _features(self, policy: ModelPolicy) -> torch.Tensor:
        """[B, T, 7]: the state's features and its place, as a share of what the run allows (never of its own length)."""
        state_B_T_F = observe_features(policy, len(self.e), self.micro_batch)
        place_B_T_1 = (places(self.e.written_B_T).double() / self.objective.tokens)[..., None]
        return torch.cat([state_B_T_F, place_B_T_1], -1)

    def _x(self, rollouts: Rollouts, seen: Tokens, features, estimator: EstimatorSettings) -> EntropyGradient:
        pathwise = self.settings.generation.rb_requires_grad
        written_B_T, group_B = rollouts.written_B_T, rollouts.group_B
        return entropy_gradient(seen, written_B_T, group_B, estimator, features, pathwise=pathwise)

    def _by_gradients(self, policy, x: EntropyGradient, direction) -> tuple[float, dict[str, float]]:
        """X · v by reverse mode, and the norms of X and of its two terms."""
        tick = self._tick("X by reverse mode: its two terms", 2 * len(self.e))
        combined = x.combined()
        nothing_B_T = torch.zeros_like(combined.score_B_T)
        score = gradient(policy, combined.score_B_T, nothing_B_T, self.micro_batch, tick=tick)
        path = gradient(policy, nothing_B_T, combined.path_B_T, self.micro_batch, tick=tick)
        total = {name: score[name] + path[name] for name in score}
        norms = {"x": norm(total), "x_score": norm(score), "x_pathwise": norm(path)}
        return dot(total, direction), norms

    def _estimators(self, seen: Tokens, features, derivative: Tokens) -> Iterator[dict[str, Any]]:
        """Every estimator and baseline on the same rollouts and the same derivatives."""
        unit = self.settings.estimator.estimand
        kinds = [{"mode": mode} for mode in ("none", "constant", "residual_mu", "regression")]
        kinds.insert(3, {"mode": "residual_mu", "fit": "previous"})
        choices = [EstimatorSettings(estimand=unit, baseline=BaselineSettings(**kind)) for kind in kinds]
        if unit != PER_SEQUENCE_MEAN:
            choices.insert(0, EstimatorSettings(x_estimator_mode="naive", estimand=unit))
        for choice in choices:
            x = entropy_gradient(seen, self.e.written_B_T, self.e.group_B, choice, features)
            prediction = predict(x, derivative)
            mode = choice.baseline.mode if choice.x_estimator_mode == "rb_residual" else None
            yield {
                "x_estimator_mode": choice.x_estimator_mode,
                "baseline": mode,
                "fit": choice.baseline.fit if mode in ("constant", "residual_mu") else None,
                "delta_h1": self.lr * prediction.slope,
                "se": self.lr * prediction.jackknife_se,
                "conditional_se": self.lr * prediction.conditional_se,
                "score_weight_variance": x.residual_variance,
            }

    def _truth(self, policy, seen: Tokens, direction, prediction, at: float) -> dict[str, float]:
        eta = at * self.lr
        there = moved(policy.parameters, direction, eta)
        after = self._observe(policy, f"ΔH at {at:g} times the learning rate", there)
        estimand = self.settings.estimator.estimand
        change = entropy_change(seen, after, self.e.written_B_T, self.e.group_B, estimand)
        predicted, se = prediction.at(eta)
        return {"eta": eta, **asdict(change), "predicted": predicted, "predicted_se": se}

    def _derivative_check(self, policy, derivative: Tokens, direction) -> float:
        """Relative distance of the derivatives from central differences, over the first micro-batch."""
        rows = min(self.micro_batch, len(self.e))
        h = 1e-3 * self.lr
        there = (moved(policy.parameters, direction, step) for step in (h, -h))
        up, down = (observe(policy, rows, rows, parameters) for parameters in there)
        off = size = 0.0
        for name in ("log_prob_B_T", "entropy_B_T"):
            exact = getattr(derivative, name)[:rows]
            off += float(((getattr(up, name) - getattr(down, name)) / (2 * h) - exact).square().sum())
            size += float(exact.square().sum())
        return (off / size) ** 0.5 if size else 0.0

    def _u_statistic(self) -> dict[str, float]:
        """δH₁ when U both makes and measures the update, without products of a prompt with itself."""
        policy = ModelPolicy(self.model, self.u, self.sampling)
        y_policy = ModelPolicy(self.model, self.u, Sampling(self.sampling.temperature))
        seen = observe(policy, len(self.u), self.micro_batch)
        estimator = self.settings.estimator
        if estimator.x_estimator_mode == "rb_residual" and estimator.baseline.mode == "regression":
            estimator = estimator.model_copy(update={"baseline": BaselineSettings()})
        x = self._x(self.u, seen, None, estimator).combined()
        weight_B_T, nothing_B_T = self._weights(self.u), torch.zeros_like(x.score_B_T)
        P = len(self.u.prompts)
        tick = self._tick("U-statistic: gradients of U's prompts one by one", P)
        mean_x = gradient(policy, x.score_B_T, x.path_B_T, self.micro_batch)
        mean_y = diagonal_step(gradient(y_policy, weight_B_T, nothing_B_T, self.micro_batch), self.optimizer)
        along_mean = x.along(along(policy, mean_y, len(self.u), self.micro_batch))
        x_dot_mean_y, mean_x_dot_y, own = [], [], []
        for group in self.u.prompts:
            rows = (self.u.group_B == group).nonzero().flatten().tolist()
            y_gradient = gradient(y_policy, weight_B_T, nothing_B_T, self.micro_batch, rows)
            y = diagonal_step(y_gradient, self.optimizer)
            of_group = gradient(policy, x.score_B_T, x.path_B_T, self.micro_batch, rows)
            x_dot_mean_y.append(P * float(along_mean[rows].sum()))
            mean_x_dot_y.append(P * dot(mean_x, y))
            own.append(P * P * dot(of_group, y))
            tick(1)
        products = (torch.tensor(v, dtype=torch.float64) for v in (x_dot_mean_y, mean_x_dot_y, own))
        return {name: self.lr * value for name, value in asdict(u_statistic(*products)).items()}


def _size(rollouts: Rollouts) -> dict[str, int]:
    tokens = int(rollouts.written_B_T.sum())
    return {"prompts": len(rollouts.prompts), "rollouts": len(rollouts), "tokens": tokens}
