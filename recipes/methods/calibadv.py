"""CalibAdv: the turns of a failed trajectory are blamed less, the more evidence they found.

Paper: 2604.18235; released code: wujwyi/CalibAdv.
Departures: a turn's reward is its evidence, in place of the released q (judged pages, less repeats); template tokens are not
scaled apart; zero_if_all_found changes no other turn (released: it cuts those before to whole numbers).
Exact bias: a turn's evidence moves its own advantage alone, whatever comes of it; that of the outcome operator.
Own cosine: .990 in the exact world; minus GRPO's on the lab's policies -.001 ± .002 (a failure's turns hardly raise the gold
answer's probability); -.010 ± .053 (9 policies) with provenance as evidence.
Area over GRPO: not run.
Commit: 23dae403 had it in verl_credit.credit.
"""

from collections.abc import Callable
from typing import Literal

import torch

from verl_credit.credit import EPS, AtLeastZero, Count, Positive, Tables, group_stats, z_score


def calibadv(
    tables: Tables,
    *,
    evidence: Literal["clip", "sigmoid"] = "clip",
    upper_limit: bool = False,
    zero_if_all_found: bool = False,
    balance: Literal["none", "answers"] = "none",
    outcome_operator: str | Callable[..., torch.Tensor] = "grpo",
    norm_by_std: bool = True,
    ddof: Count = 1,
    variance_floor: AtLeastZero = 0.0,
    eps: Positive = EPS,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scales a failure's advantage by what each of its turns left unfound.

        A_k = R (1 - q_k) where R < 0, else R, A_answer = R
        q_k = r_k, at least 0 and at most 1 (evidence=clip), or sigmoid(z(r_k among the prompt's turns)) (sigmoid)

    upper_limit: A_k = R + (M - R) q_k where R < 0, M the prompt's largest R, at least 0. zero_if_all_found: A_k = 0 where
    R > 0 and every trajectory of the prompt that has turn k has q_k = 1 there. balance="answers", which the released recipe
    sets: positive answers are scaled so that the tokens of a prompt's answers have the advantages' sum 0. A better outcome
    can then lower its answer. A prompt with answers of one sign alone gets 0 for them.
    clip is for rewards that are shares (a tool's reward, a gain of probability), sigmoid for those without bounds: equal
    rewards give q = 1/2. A turn without a reward, or with a lost one, has q = 0.
    """
    if evidence == "sigmoid" and zero_if_all_found:
        raise ValueError("zero_if_all_found=True with evidence='sigmoid': q is below 1; leave it at False")
    norm = {"norm_by_std": norm_by_std, "ddof": ddof, "variance_floor": variance_floor, "eps": eps}
    outcome_B = tables.outcome_advantage(outcome_operator, **norm)
    q_B_K, group_B, R_B_1 = _evidence(tables, evidence), tables.group_B, outcome_B[:, None]
    most_B = torch.zeros_like(outcome_B)
    if upper_limit:
        most_B = most_B.scatter_reduce(0, group_B, outcome_B, "amax")[group_B]
    advantage_B_K = torch.where(R_B_1 < 0, R_B_1 + (most_B[:, None] - R_B_1) * q_B_K, R_B_1)
    if zero_if_all_found:
        unfound_B_K = tables.turn_B_K1[:, 1:] & (q_B_K < 1)
        unfound_G_K = torch.zeros_like(q_B_K).index_add(0, group_B, unfound_B_K.to(q_B_K))
        advantage_B_K = torch.where((R_B_1 > 0) & (unfound_G_K[group_B] == 0), 0.0, advantage_B_K)
    answer_B = _balanced(tables, outcome_B) if balance == "answers" else outcome_B
    return advantage_B_K, answer_B, tables.ones()


calibadv.reads = ("rewards", "groups", "gains", "turn tokens")
calibadv.properties = ("centred", "normalised")
calibadv.outputs = "sub-agents"


def _evidence(tables: Tables, evidence: str) -> torch.Tensor:
    if evidence == "clip":
        return tables.reward_B_K.clamp(0.0, 1.0)
    group_B_K, member_B_K = tables.group_B[:, None].expand_as(tables.reward_B_K), tables.has_reward_B_K
    z_N = z_score(tables.reward_B_K.flatten(), group_B_K.flatten(), member_N=member_B_K.flatten())
    return torch.where(member_B_K, z_N.view_as(tables.reward_B_K).sigmoid(), 0.0)


def _balanced(tables: Tables, outcome_B: torch.Tensor) -> torch.Tensor:
    if tables.turn_tokens_B_K1 is None:
        raise ValueError("balance='answers' needs turn_tokens_B_K1, which is not given")
    tokens_B = tables.turn_tokens_B_K1.gather(1, tables.n_tool_turns_B[:, None]).squeeze(1)
    mass_B = torch.where(tables.valid_B, outcome_B * tokens_B, 0.0)
    up_B, down_B = (
        group_stats(part_B, tables.group_B, member_N=tables.valid_B).mean_N
        for part_B in (mass_B.clamp(min=0), (-mass_B).clamp(min=0))
    )
    factor_B = torch.where(outcome_B > 0, down_B / torch.where(up_B > 0, up_B, 1.0), 1.0)
    return torch.where((up_B > 0) & (down_B > 0), outcome_B * factor_B, 0.0)
