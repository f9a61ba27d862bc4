"""The entropy probe on the lab, in float64: is the change linear, do the intervals hold, which baseline is best?

    python evidence/probe/lab.py runs/spark_sweep/separate/checkpoints/global_step_15 --out runs/probe_lab

One update is made from a mini-batch of the run, 4 prompts. 804 other prompts are the pool: its change of entropy, by
importance sampling, is the truth. 100 seeds draw 32 prompts of the pool each, and predict it. Writes OUT/lab.json, lab.md.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from scipy import stats

from verl_credit.commands.probe_rollouts import collect, saved_step
from verl_credit.probe.checkpoint import build_model, read_checkpoint
from verl_credit.probe.distribution import Sampling
from verl_credit.probe.entropy_gradient import entropy_gradient
from verl_credit.probe.objective import credit_weights
from verl_credit.probe.policy import (
    ModelPolicy,
    Tokens,
    along,
    dot,
    gradient,
    moved,
    norm,
    observe,
    observe_features,
)
from verl_credit.probe.prediction import predict
from verl_credit.probe.returns import places
from verl_credit.probe.rollouts import Rollouts
from verl_credit.probe.settings import BaselineSettings, EstimatorSettings
from verl_credit.probe.stored import read_rollouts
from verl_credit.probe.truth import entropy_change, log_log_slope
from verl_credit.probe.update import adamw_step
from verl_credit.run.tables import ROLLOUTS, table_path

SEEDS, POOL, PER_SEED, UPDATE = 100, 804, 32, 4
ETAS = [
    10 ** (k / 4 - 1.5) for k in range(9)
]  # two decades; the upper one is around the learning rate of training
DECADES = {"around the learning rate": ETAS[4:], "around a tenth of it": ETAS[:5]}
BLOCKS = 20  # of prompts, for the error of a slope
CHOICES = {
    "naive": EstimatorSettings(x_estimator_mode="naive"),
    "rb, none": EstimatorSettings(baseline=BaselineSettings(mode="none")),
    "rb, constant": EstimatorSettings(baseline=BaselineSettings(mode="constant")),
    "rb, residual_mu": EstimatorSettings(),
    "rb, residual_mu (previous)": EstimatorSettings(baseline=BaselineSettings(fit="previous")),
    "rb, regression": EstimatorSettings(baseline=BaselineSettings(mode="regression")),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--micro-batch", type=int, default=8)
    args = parser.parse_args()
    saved = saved_step(args.checkpoint)
    path = table_path(args.out / "rollouts", ROLLOUTS, saved.step + 1)
    if not path.exists():
        collect(
            saved.folder, args.out / "rollouts", prompts=POOL + UPDATE, overrides=["search.timeout_s=900"]
        )
    result = measure(saved, path, args.micro_batch)
    (args.out / "lab.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / "lab.md").write_text(page(result))
    print(page(result))


@dataclass(frozen=True)
class Update:
    """One update from the first prompts of the rollouts, and the other prompts, on which its effect is measured."""

    pool: Rollouts
    u: Rollouts
    policy: ModelPolicy
    v: dict[str, torch.Tensor]
    """Change of the parameters per learning rate: the exact step of the run's AdamW."""
    lr: float
    tokens: int


def one_update(saved, path: Path, micro: int) -> Update:
    rollouts, facts = read_rollouts(path)
    u, pool = rollouts.of_prompts(rollouts.prompts[:UPDATE]), rollouts.of_prompts(rollouts.prompts[UPDATE:])
    checkpoint = read_checkpoint(saved.folder)
    model = build_model(saved.folder, checkpoint.parameters, torch.float64, "cpu")
    sampling = Sampling(facts.temperature, facts.top_p)
    tokens = int(saved.config.actor_rollout_ref.rollout.response_length)
    o = facts.objective
    policy_u, policy = ModelPolicy(model, u, Sampling(facts.temperature)), ModelPolicy(model, pool, sampling)
    weight_B_T = credit_weights(u, o["loss_agg_mode"], o["loss_scale_factor"], tokens)
    loss_gradient = gradient(policy_u, weight_B_T, torch.zeros_like(weight_B_T), micro)
    v = adamw_step(policy_u.parameters, loss_gradient, checkpoint.optimizer, max_grad_norm=o["grad_clip"])
    print(
        f"{len(u)} rollouts of U, {len(pool)} of the pool; |g| {norm(loss_gradient):.3g}, |v| {norm(v):.3g}",
        flush=True,
    )
    return Update(pool, u, policy, v, checkpoint.optimizer.lr, tokens)


def measure(saved, path: Path, micro: int) -> dict:
    begun = time.time()
    made = one_update(saved, path, micro)
    pool, u, policy, v, lr, tokens = made.pool, made.u, made.policy, made.v, made.lr, made.tokens
    seen = observe(policy, len(pool), micro)
    print(f"log-probs and entropies after {time.time() - begun:.0f} s", flush=True)
    state_B_T_F = observe_features(policy, len(pool), micro)
    features = torch.cat([state_B_T_F, (places(pool.written_B_T).double() / tokens)[..., None]], -1)
    derivative = along(policy, v, len(pool), micro)
    print(f"derivatives after {time.time() - begun:.0f} s", flush=True)
    unit = EstimatorSettings().estimand
    changes, afters = [], []
    for factor in ETAS:
        after = observe(policy, len(pool), micro, moved(policy.parameters, v, factor * lr))
        afters.append(after)
        changes.append(entropy_change(seen, after, pool.written_B_T, pool.group_B, unit))
        print(f"{factor:.3f} lr: {changes[-1]}", flush=True)
    truth = changes[6]  # at the learning rate of training
    engine = (pool.log_prob_B_T - seen.log_prob_B_T)[pool.written_B_T].abs()
    return {
        "checkpoint": saved.folder.name,
        "lr": lr,
        "pool": {"prompts": len(pool.prompts), "rollouts": len(pool), "tokens": int(pool.written_B_T.sum())},
        "u": {"prompts": len(u.prompts), "rollouts": len(u)},
        "entropy": predict(
            entropy_gradient(seen, pool.written_B_T, pool.group_B, EstimatorSettings()), derivative
        ).entropy,
        "largest_difference_from_the_engines_log_probs": float(engine.max()),
        "truth": [
            {"eta": f * lr, "change": c.change, "se": c.se, "ess": c.ess, "clipped": c.clipped}
            for f, c in zip(ETAS, changes, strict=True)
        ],
        "slopes": {name: slope(pool, seen, afters, lr, factors) for name, factors in DECADES.items()},
        "table": table(pool, seen, features, derivative, lr, truth.change),
        "checks": checks(policy, pool, seen, features, derivative, v, micro),
        "seconds": time.time() - begun,
    }


def slope(pool, seen, afters, lr: float, factors: list[float]) -> dict[str, float]:
    """log |ΔH| against log η, and its error: blocks of prompts are left out one by one."""

    def of(groups: set[int]) -> float:
        rows = [row for row, group in enumerate(pool.group_B.tolist()) if group in groups]
        before, etas, changes = cut(seen, rows), [], []
        for factor in factors:
            after = cut(afters[ETAS.index(factor)], rows)
            args = pool.written_B_T[rows], pool.group_B[rows], EstimatorSettings().estimand
            changes.append(entropy_change(before, after, *args).change)
            etas.append(factor * lr)
        return log_log_slope(etas, changes)

    every = set(pool.prompts)
    left_out = [of(every - set(pool.prompts[block::BLOCKS])) for block in range(BLOCKS)]
    mean = sum(left_out) / BLOCKS
    se = ((BLOCKS - 1) / BLOCKS * sum((one - mean) ** 2 for one in left_out)) ** 0.5
    return {"slope": of(every), "se": se}


def cut(tokens: Tokens, rows: list[int]) -> Tokens:
    return Tokens(tokens.log_prob_B_T[rows], tokens.entropy_B_T[rows])


def table(pool, seen, features, derivative, lr: float, truth: float) -> dict:
    """By estimator: 100 predictions, their intervals, and how often these hold the truth."""
    groups, found = pool.prompts, {}
    quantile = float(stats.t.ppf(0.975, PER_SEED - 1))
    for name, choice in CHOICES.items():
        values, errors = [], []
        for seed in range(SEEDS):
            part = set(random.Random(seed).sample(groups, PER_SEED))
            rows = [row for row, group in enumerate(pool.group_B.tolist()) if group in part]
            x = entropy_gradient(
                cut(seen, rows), pool.written_B_T[rows], pool.group_B[rows], choice, features[rows]
            )
            value, se = predict(x, cut(derivative, rows)).at(lr)
            values.append(value)
            errors.append(se)
        held = sum(abs(value - truth) <= quantile * se for value, se in zip(values, errors, strict=True))
        mean = sum(values) / SEEDS
        sd = (sum((value - mean) ** 2 for value in values) / (SEEDS - 1)) ** 0.5
        found[name] = {"mean": mean, "sd": sd, "mean_se": sum(errors) / SEEDS, "held": held}
    return found


def checks(policy, pool, seen, features, derivative, v, micro: int) -> dict:
    """Section 6 of the founding plan, on the first 32 prompts of the pool."""
    part = set(pool.prompts[:32])
    rows = [row for row, group in enumerate(pool.group_B.tolist()) if group in part]
    part_seen = cut(seen, rows)
    rb = entropy_gradient(part_seen, pool.written_B_T[rows], pool.group_B[rows], EstimatorSettings())
    bare = entropy_gradient(part_seen, pool.written_B_T[rows], pool.group_B[rows], CHOICES["rb, none"])
    combined, zero = rb.combined(), torch.zeros(len(rows), pool.written_B_T.shape[1], dtype=torch.float64)
    whole_zero = torch.zeros_like(pool.written_B_T, dtype=torch.float64)

    def of(score, path, size: int):
        score_B_T, path_B_T = whole_zero.clone(), whole_zero.clone()
        score_B_T[rows], path_B_T[rows] = score, path
        return gradient(policy, score_B_T, path_B_T, size, rows)

    score, path = of(combined.score_B_T, zero, micro), of(zero, combined.path_B_T, micro)
    total = {name: score[name] + path[name] for name in score}
    small = of(combined.score_B_T, combined.path_B_T, 5)
    off = {name: total[name] - small[name] for name in total}
    predicted = predict(rb, cut(derivative, rows)).slope
    return {
        "norm_x": norm(total),
        "norm_score_term": norm(score),
        "norm_pathwise_term": norm(path),
        "relative_difference_of_two_micro_batch_sizes": norm(off) / norm(total),
        "dot_product_over_jvp": dot(total, v) / predicted,
        "variance_of_score_weights_none": bare.residual_variance,
        "variance_of_score_weights_residual_mu": rb.residual_variance,
    }


def page(r: dict) -> str:
    u, pool, naive = r["u"], r["pool"], r["table"]["naive"]["sd"]
    lines = [
        f"{r['checkpoint']}, learning rate {r['lr']:g}, entropy {r['entropy']:.4f} nats per token. "
        f"Update: {u['rollouts']} rollouts of {u['prompts']} prompts. "
        f"Pool: {pool['rollouts']} rollouts of {pool['prompts']} prompts, {pool['tokens']} tokens. "
        f"{r['seconds']:.0f} s.",
        "",
        "| learning rate | ΔH | se | effective rollouts | clipped |",
        "|---|---|---|---|---|",
    ]
    for t in r["truth"]:
        change = f"{t['change']:+.7f} | {t['se']:.7f}"
        lines.append(f"| {t['eta']:.3g} | {change} | {t['ess']:.0f} | {100 * t['clipped']:.1f} % |")
    lines += [
        "",
        "log |ΔH| grows with log η by "
        + ", ".join(
            f"{s['slope']:.4f} ± {s['se']:.4f} in the decade {name}" for name, s in r["slopes"].items()
        )
        + ".",
        "",
        f"| estimator | mean of {SEEDS} δH₁ | sd | variance (naive: 1) | mean jackknife se | 95 % intervals that hold ΔH |",
        "|---|---|---|---|---|---|",
    ]
    for name, t in r["table"].items():
        value, share = f"{t['mean']:+.6f} | {t['sd']:.6f}", (t["sd"] / naive) ** 2
        lines.append(f"| {name} | {value} | {share:.3f} | {t['mean_se']:.6f} | {t['held']} of {SEEDS} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
