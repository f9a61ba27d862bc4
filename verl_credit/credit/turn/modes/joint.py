"""The mode none reads outcomes; joint and separate (IGPO) give gains and outcomes of a prompt one mean and std, or two."""

from collections.abc import Callable
from typing import Any

from verl_credit.credit.groups import EPS, VARIANCE_FLOOR, z_score
from verl_credit.credit.operator import (
    CENTRED,
    NORMALISED,
    SUB_AGENTS,
    AtLeastZero,
    Count,
    Positive,
    Share,
    WithoutGains,
    refuse_unread,
)
from verl_credit.credit.turn.mode import ModeOutput, turn_mode
from verl_credit.credit.turn.tables import Tables
from verl_credit.lazy import torch


@turn_mode(
    name="none",
    reads=("rewards",),
    reduces_to="the outcome operator alone",
    bias="that of the outcome operator",
    source="2402.03300",
    properties=CENTRED | NORMALISED,
    without_gains=WithoutGains(lambda n: 1.0),
    outputs=SUB_AGENTS,
)
def none(
    tables: Tables,
    *,
    outcome_scale: AtLeastZero = 1.0,
    outcome_operator: str | Callable[..., "torch.Tensor"] = "grpo",
    norm_by_std: bool = True,
    ddof: Count = 1,
    variance_floor: AtLeastZero = 0.0,
    eps: Positive = EPS,
) -> ModeOutput:
    """Gives every turn the outcome's advantage, by default GRPO's with verl's constants, and reads no turn rewards.

        A_k = R for every turn

    Other outcome operators have no constants: they ignore norm_by_std; ddof, variance_floor and eps are refused with
    them.
    """
    if outcome_operator != "grpo":
        unread = {"ddof": (ddof, 1), "variance_floor": (variance_floor, 0.0), "eps": (eps, EPS)}
        label = getattr(outcome_operator, "__name__", repr(outcome_operator))
        refuse_unread(f"outcome_operator={label}", "only grpo reads it", **unread)
    norm = {"norm_by_std": norm_by_std, "ddof": ddof, "variance_floor": variance_floor, "eps": eps}
    outcome_B = outcome_scale * tables.outcome_advantage(outcome_operator, **norm)
    return outcome_B[:, None].expand_as(tables.reward_B_K), outcome_B, tables.ones()


@turn_mode(
    name="joint",
    reduces_to="none, when there are no gains",
    bias=(
        "gains and outcomes share a mean: long trajectories shift it, and equal outcomes do not give answers 0 (beside one "
        "gain a row, of mean .16 and std .12, a group that solves all gets +.98, one that fails all -.69)"
    ),
    departures="turns come from turn ids, not from rewards that differ from 0; a single value gives 0",
    source="2510.14967",
    exempt={
        "better_tools": "a better outcome can raise the shared std, and large turn rewards then count less"
    },
)
def joint(
    tables: Tables,
    *,
    gamma: Share = 1.0,
    gain_scale: AtLeastZero = 1.0,
    outcome_scale: AtLeastZero = 1.0,
    norm_by_std: bool = True,
    ddof: Count = 0,
    variance_floor: AtLeastZero = VARIANCE_FLOOR,
    eps: Positive = EPS,
) -> ModeOutput:
    """Compares gains and outcomes with each other.

        A_k = z(gain_k) + gamma A_(k+1), z over the prompt's outcomes and gains together
        A_answer = z(r)

    A tied group's answer turns do not get 0 here: its outcomes are compared with the gains that they are pooled with. With
    gains near 0, a group that solves all gets answers near +1, one that fails all answers near -.7.
    """
    group_B_K = tables.group_B[:, None].expand_as(tables.reward_B_K)
    rows = tables.outcome_B.shape[0]
    norm = dict[str, Any](norm_by_std=norm_by_std, ddof=ddof, variance_floor=variance_floor, eps=eps)
    z_N = z_score(
        torch.cat([tables.outcome_B, tables.reward_B_K.flatten()]),
        torch.cat([tables.group_B, group_B_K.flatten()]),
        member_N=torch.cat([tables.valid_B, tables.has_reward_B_K.flatten()]),
        **norm,
    )
    z_B_K, outcome_B = gain_scale * z_N[rows:].view_as(tables.reward_B_K), outcome_scale * z_N[:rows]
    advantage_B_K = tables.backward(outcome_B, lambda k, next_B: z_B_K[:, k] + gamma * next_B)
    return advantage_B_K, outcome_B, tables.ones()


@turn_mode(
    name="separate",
    reduces_to="none, when there are no gains",
    bias="all turns share one mean; where outcomes tie, R is 0 and the gains' order acts alone, at full size",
    departures="turns come from turn ids, not from rewards that differ from 0; equal values and groups of one give 0",
    source="2510.14967",
    properties=CENTRED | NORMALISED,
)
def separate(
    tables: Tables,
    *,
    gamma: Share = 1.0,
    gain_scale: AtLeastZero = 1.0,
    outcome_scale: AtLeastZero = 1.0,
    outcome_operator: str | Callable[..., "torch.Tensor"] = "grpo",
    norm_by_std: bool = True,
    ddof: Count = 0,
    variance_floor: AtLeastZero = VARIANCE_FLOOR,
    eps: Positive = EPS,
) -> ModeOutput:
    """Compares gains with all gains of the prompt, and adds them up from the answer back.

        A_k = z(gain_k) + gamma A_(k+1), z over the gains of all turns of the prompt
        A_answer = R

    A turn without a gain reads the advantage of the row's next gain.
    """
    norm = dict[str, Any](norm_by_std=norm_by_std, ddof=ddof, variance_floor=variance_floor, eps=eps)
    group_B_K = tables.group_B[:, None].expand_as(tables.reward_B_K)
    member_N = tables.has_reward_B_K.flatten()
    z_N = z_score(tables.reward_B_K.flatten(), group_B_K.flatten(), member_N=member_N, **norm)
    z_B_K = gain_scale * z_N.view_as(tables.reward_B_K)
    outcome_B = outcome_scale * tables.outcome_advantage(outcome_operator, **norm)
    advantage_B_K = tables.backward(outcome_B, lambda k, next_B: z_B_K[:, k] + gamma * next_B)
    return advantage_B_K, outcome_B, tables.ones()
