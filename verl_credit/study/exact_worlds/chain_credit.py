"""How well credit points in the chain world: its own cosine.

grpo, half_negative, gigpo      as in a run
true values, lam                `turn_gae` with V of the state; lam 0 is A*
values of EV e, lam             V with an independent error in every state, so that it explains the share e of V's variance
..., halved                     negative=0.5: what is below 0 counts half
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn.functional import cosine_similarity

from verl_credit.credit import MODES
from verl_credit.study.exact_worlds.chain_world import exact_gradient, first_policy, roll, values
from verl_credit.study.exact_worlds.fed_credit import FedCredit

LAMS = (0.0, 0.5, 0.8, 1.0)
HALF = {"": 1.0, ", halved": 0.5}
QUESTIONS = 16


def without_values() -> dict[str, FedCredit]:
    half = {"outcome_operator": "half_negative"}
    return {
        "grpo": FedCredit(MODES["none"]),
        "half_negative": FedCredit(MODES["none"], half),
        "gigpo": FedCredit(MODES["gigpo"]),
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
    rolled = paths.rolled(value_N_P_W1, QUESTIONS, torch.arange(batches * QUESTIONS))
    true_B_K1 = paths.of_states(value_N_P_W1)
    of = {"true values": true_B_K1}
    for share in explained:
        error = torch.randn(value_N_P_W1.shape, generator=random, dtype=torch.float64)
        spread = (true_B_K1[paths.turn_B_K1].var() * (1 - share)).sqrt()
        of[f"values of EV {share:g}"] = true_B_K1 + spread * paths.of_states(error)
    found = {name: credit.advantages(rolled) for name, credit in without_values().items()}
    for name, value_B_K1 in of.items():
        known = replace(rolled, true_B_K1=lambda value_B_K1=value_B_K1: value_B_K1)
        for lam in LAMS:
            for halved, negative in HALF.items():
                credit = FedCredit(MODES["turn_gae"], {"lam": lam, "negative": negative}, "true")
                found[f"{name}, lam {lam:g}{halved}"] = credit.advantages(known)
    cosines = {
        name: cosine_similarity(true_R_D, paths.gradient(prob_N_P_W_A, advantage_B_K1, batches))
        for name, advantage_B_K1 in found.items()
    }
    turns_B = 1 + paths.n_tool_turns_B.double()
    return cosines | {"turns": turns_B.view(batches, -1).mean(1)}
