"""A whole probe: the update's direction, the prediction, and the change itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from scipy.stats import t as student_t
from torch import nn

from verl_credit.credit.entropy_change import entropy_change
from verl_credit.credit.entropy_gradient import EntropyGradient, Tokens, entropy_gradient
from verl_credit.study.probe.file import ProbeSettings
from verl_credit.study.probe.kept_rollouts import Rollouts
from verl_credit.study.probe.policy import (
    ModelPolicy,
    Parameters,
    Sampling,
    along,
    dot,
    gradient,
    moved,
    norm,
    observe,
)
from verl_credit.study.probe.prediction import log_log_slope, predict
from verl_credit.study.probe.update import OptimizerState, adamw_step, credit_weights


@dataclass(frozen=True)
class Probe:
    """Everything that one probe reads. E and U must not share a prompt: ValueError."""

    model: nn.Module
    e: Rollouts
    u: Rollouts
    sampling: Sampling
    optimizer: OptimizerState
    objective: Mapping[str, Any]
    """The run's keys of its update: ``loss_agg_mode``, ``loss_scale_factor``, ``grad_clip``."""
    tokens: int
    """The longest response that the run allows."""
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
        x = entropy_gradient(seen, self.e.written_B_T, self.e.group_B)
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
            "unit": "nats per token",
            "sampling": asdict(self.sampling),
            "e": _size(self.e),
            "u": _size(self.u),
            "lr": self.lr,
            "entropy": prediction.entropy,
            "delta_h1": {
                "value": value,
                "se": se,
                "interval_95": [value - half, value + half],
                "by_dot_product": self.lr * x_dot,
            },
            "norms": norms,
            "derivative_check": self._derivative_check(e_policy, derivative, direction),
            "truth": truth,
            "log_log_slope": log_log_slope([row["eta"] for row in truth], changes) if all(changes) else None,
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

    def _direction(self, policy: ModelPolicy) -> tuple[Parameters, Parameters]:
        """(gradient of the loss, δθ per unit of learning rate)."""
        o = self.objective
        weight_B_T = credit_weights(self.u, o["loss_agg_mode"], o["loss_scale_factor"], self.tokens)
        if not weight_B_T.any():
            why = "every advantage in U is 0 (all rollouts of each prompt have the same reward)"
            raise ValueError(f"{why}: there is no update to probe; take more prompts (batch_config.B_U)")
        tick = self._tick("Y: the gradient of the loss", len(self.u))
        y = gradient(policy, weight_B_T, torch.zeros_like(weight_B_T), self.micro_batch, tick=tick)
        return y, adamw_step(policy.parameters, y, self.optimizer, max_grad_norm=o["grad_clip"])

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

    def _truth(self, policy, seen: Tokens, direction, prediction, at: float) -> dict[str, float]:
        eta = at * self.lr
        there = moved(policy.parameters, direction, eta)
        after = self._observe(policy, f"ΔH at {at:g} times the learning rate", there)
        change = entropy_change(seen, after, self.e.written_B_T, self.e.group_B)
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


def _size(rollouts: Rollouts) -> dict[str, int]:
    tokens = int(rollouts.written_B_T.sum())
    return {"prompts": len(rollouts.prompts), "rollouts": len(rollouts), "tokens": tokens}
