"""How well credit points in the chain world: its own cosine.

grpo, half_negative, gigpo      as in a run
true values, lam                `turn_gae` with V of the state; lam 0 is A*
values of EV e, lam             V with an independent error in every state, so that it explains the share e of V's variance
..., halved                     negative=0.5: what is below 0 counts half
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import cosine_similarity

from verl_credit.study.exact_worlds.chain_world import (
    QUESTIONS,
    exact_gradient,
    first_policy,
    roll,
    values,
)

LAMS = (0.0, 0.5, 0.8, 1.0)
HALF = {"": 1.0, ", halved": 0.5}
OUTCOMES = {
    "grpo": {"mode": "none"},
    "half_negative": {"mode": "none", "outcome_operator": "half_negative"},
    "gigpo": {"mode": "gigpo"},
}


def own_cosines(
    hops: int, batches: int, seed: int = 0, explained: Sequence[float] = (0.8, 0.5, 0.2)
) -> dict[str, torch.Tensor]:
    """Own cosine by credit, one for each batch, [R]; and ``turns``, the mean number of a batch's turns. Every batch has
    questions of its own, and its gradient is compared with the exact gradient of their chances."""
    random = torch.Generator().manual_seed(seed)
    prob_N_P_W_A = first_policy(hops, batches, QUESTIONS, random).softmax(-1)
    paths, true_R_D = roll(prob_N_P_W_A, random), exact_gradient(prob_N_P_W_A, batches)
    value_N_P_W1, _ = values(prob_N_P_W_A)
    true_B_K1 = paths.of_states(value_N_P_W1)
    of = {"true values": true_B_K1}
    for share in explained:
        error = torch.randn(value_N_P_W1.shape, generator=random, dtype=torch.float64)
        spread = (true_B_K1[paths.turn_B_K1].var() * (1 - share)).sqrt()
        of[f"values of EV {share:g}"] = true_B_K1 + spread * paths.of_states(error)
    found = {name: paths.credit(**options) for name, options in OUTCOMES.items()}
    for name, value_B_K1 in of.items():
        for lam in LAMS:
            for halved, negative in HALF.items():
                credit = paths.credit("turn_gae", value_B_K1, lam=lam, negative=negative)
                found[f"{name}, lam {lam:g}{halved}"] = credit
    cosines = {
        name: cosine_similarity(true_R_D, paths.gradient(prob_N_P_W_A, advantage_B_K1, batches))
        for name, advantage_B_K1 in found.items()
    }
    turns_B = 1 + paths.n_tool_turns_B.double()
    return cosines | {"turns": turns_B.view(batches, -1).mean(1)}
