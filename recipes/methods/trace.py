"""TRACE: the outcome's advantage, plus what a turn and the next ones gained on average; `credit=trace`.

Paper: 2607.13988, checked with a public adaptation of its Algorithm 1; there is no release.
Departures: a turn whose horizon has no reward has r = 0, so that a step without gains is plain GRPO; a missing or lost
reward is left out of the mean.
Exact bias: rewards have no baseline, so that a turn that gains less than the others' is reinforced all the same; the end's
part scales the outcome up in the last turns; own sample in the outcome's mean and std.
Own cosine: .994 in the exact world; minus GRPO's on 9 of the lab's policies -.016 ± .016 (gains under the frozen start).
Area over GRPO: not run.
Commit: 23dae403 had it in verl_credit.credit.
"""

from collections.abc import Callable

import torch

from verl_credit.credit import EPS, AtLeastZero, Count, Number, Positive, Share, Tables


def trace(
    tables: Tables,
    *,
    horizon: Number = 3,
    horizon_gamma: Share = 0.8,
    end_bonus: AtLeastZero = 2.0,
    outcome_weight: AtLeastZero = 1.0,
    turn_weight: AtLeastZero = 0.2,
    outcome_operator: str | Callable[..., torch.Tensor] = "grpo",
    norm_by_std: bool = True,
    ddof: Count = 0,
    variance_floor: AtLeastZero = 0.0,
    eps: Positive = EPS,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Adds the mean of a turn's reward and the next ones to the outcome's advantage.

        A_k = outcome_weight R + turn_weight r_k, A_answer = outcome_weight R
        r_k = sum over j < H of g^j gain_(k+j) / sum over j < H of g^j, cut at the last tool turn T-1
        r_k <- r_k + end_bonus g^(T-k) R where k + H reaches T, H = horizon, g = horizon_gamma

    Its gains are changes of V = log(d_0 / d), d = .1 - mean log p(gold) under the frozen reference: info_gain_type=log_gap,
    info_gain_scorer=reference. It takes other turn rewards too.
    """
    norm = {"norm_by_std": norm_by_std, "ddof": ddof, "variance_floor": variance_floor, "eps": eps}
    outcome_B_1 = tables.outcome_advantage(outcome_operator, **norm)[:, None]
    known_B_K = tables.has_reward_B_K.to(tables.reward_B_K)
    sum_B_K, weight_B_K = torch.zeros_like(known_B_K), torch.zeros_like(known_B_K)
    for j in range(min(horizon, known_B_K.shape[1])):
        reward_B_K, one_B_K = (
            torch.nn.functional.pad(values_B_K[:, j:], (0, j))
            for values_B_K in (tables.reward_B_K, known_B_K)
        )
        sum_B_K, weight_B_K = sum_B_K + horizon_gamma**j * reward_B_K, weight_B_K + horizon_gamma**j * one_B_K
    left_B_K = (
        (tables.n_tool_turns_B[:, None] - tables.columns_K1[:-1]).clamp(min=1).to(tables.reward_B_K)
    )  # T - k
    end_B_K = end_bonus * horizon_gamma**left_B_K * (left_B_K <= horizon) * outcome_B_1
    mean_B_K = sum_B_K / torch.where(weight_B_K > 0, weight_B_K, 1.0)
    turn_B_K = torch.where(weight_B_K > 0, mean_B_K + end_B_K, 0.0)
    outcome_B_1 = outcome_weight * outcome_B_1
    return outcome_B_1 + turn_weight * turn_B_K, outcome_B_1[:, 0], tables.ones()


trace.properties = ("centred", "normalised")
