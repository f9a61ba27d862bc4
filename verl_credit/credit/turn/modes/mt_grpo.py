"""mt_grpo: the outcome's advantage, plus that of each turn's own reward among the prompt's rewards of the same turn."""

from typing import Literal

from verl_credit.credit.groups import z_score
from verl_credit.credit.operator import CENTRED, AtLeastZero, Positive
from verl_credit.credit.turn.mode import ModeOutput, turn_mode
from verl_credit.credit.turn.tables import Tables
from verl_credit.lazy import torch


@turn_mode(
    name="mt_grpo",
    reads=("rewards", "groups", "gains", "first results"),
    reduces_to="none with eps 1e-4, when no turn has a reward or turn_weight is 0",
    bias="as turn-group: the members of a turn's group are those that came so far (leave_one_out is the unbiased one)",
    departures=(
        "a reward per turn instead of one per trajectory and one split; rows without a result keep their scale; "
        "parity=released: as released"
    ),
    source="2505.11821; SiliangZeng/Multi-Turn-RL-Agent",
    properties=CENTRED,
    exempt={"no_gains": "its eps is 1e-4 as released, that of none 1e-6"},
    per_turn=True,
)
def mt_grpo(
    tables: Tables,
    *,
    turn_weight: AtLeastZero = 1.0,
    variance_floor: AtLeastZero = 0.0,
    eps: Positive = 1e-4,
    parity: Literal["none", "released"] = "none",
) -> ModeOutput:
    """Adds a turn's own reward, compared with the prompt's rewards of the same turn, to the outcome's advantage.

        A_k = z(R) + turn_weight z_k(r_k per prompt and turn), the first term alone where there is no reward

    z(x) = (x - mean) / (std + eps) with ddof 1 over the prompt; z_k over the trajectories that have a reward in turn k. A
    turn without a reward and the answer turn have the outcome's term alone. Ties and groups of one give 0.

    parity="released": one turn reward u = sum of r_k per trajectory and one split, c = result_turn_B (-1: none; the first
    turn with a reward, if it is not given; read here only):  A_k = z(R) + turn_weight z(u) up to turn c and z(R) after it;
    where c is -1 A_k = z(R + u), whatever turn_weight is.
    Released defects that are not in the default: that change of scale; one split for several results; a first failing call
    that shares the credit of a later success; reward weights that are dropped; message numbers used as mask segments.
    A trajectory that lost a turn reward is no member of that turn's group (released: of u's) and reads z(R) there. With
    parity="released" u is the sum of the rewards that there are; a trajectory with tool turns and no reward at all, where
    others of its prompt have one, is no member of u's group either.
    """
    norm = {"ddof": 1, "variance_floor": variance_floor, "eps": eps}
    outcome_B = tables.outcome_advantage("grpo", **norm)
    if parity == "released":
        return *tables.split(_released(tables, outcome_B, turn_weight, norm)), tables.ones()
    if tables.result_turn_B is not None:
        raise ValueError(
            f"result_turn_B with parity={parity!r}: only parity='released' reads it; leave it out"
        )
    turn_B_K = turn_weight * tables.z_score_per_turn(tables.reward_B_K, **norm)
    return outcome_B[:, None] + turn_B_K, outcome_B, tables.ones()


def _released(tables: Tables, outcome_B: "torch.Tensor", turn_weight: float, norm: dict) -> "torch.Tensor":
    result_B = tables.result_turn_B
    if result_B is None:
        reward_or_end_B_K1 = torch.nn.functional.pad(tables.has_reward_B_K, (0, 1), value=True)
        first_B = reward_or_end_B_K1.int().argmax(dim=1)
        result_B = torch.where(first_B < tables.columns_K1[-1], first_B, -1)
    turn_reward_B = tables.reward_B_K.sum(dim=1)
    without_B = tables.missing_reward_B_K.any(dim=1) & ~tables.has_reward_B_K.any(dim=1)
    known_B = tables.valid_B & ~tables.lost_reward_B_K.any(dim=1) & ~without_B
    compared = {"group_N": tables.group_B, "member_N": known_B, **norm}
    turn_B = z_score(turn_reward_B, **compared)
    sum_B = z_score(tables.outcome_B + turn_reward_B, **compared)
    up_to_B_K1 = tables.columns_K1 <= result_B[:, None]
    split_B_K1 = outcome_B[:, None] + turn_weight * turn_B[:, None] * up_to_B_K1
    without_B_1 = (known_B & (result_B < 0))[:, None]
    return torch.where(without_B_1, sum_B[:, None], split_B_K1)
