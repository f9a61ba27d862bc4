"""Credit assignment for multi-turn GRPO as pure functions of tensors, with torch only."""

from verl_credit.credit.groups import EPS, GroupStats, group_counts, group_stats, z_score
from verl_credit.credit.loss import AGG_MODES, RATIO_LEVELS, aggregate, turn_policy_loss
from verl_credit.credit.operator import AtLeastZero, Count, Number, Operator, Positive, Share
from verl_credit.credit.outcome import (
    OUTCOME_OPERATORS,
    grpo,
    half_negative,
    low_baseline,
    maxrl,
    reinforce_pp,
    rloo,
)
from verl_credit.credit.planning.planning import STRATEGIC_GRAMS, planning_mask
from verl_credit.credit.token.gtpo import entropy_mask, gtpo_weights, hicra, sepa_amp, sepa_amp_c, sepa_pool
from verl_credit.credit.token.gtpo_canonical import CANONICAL, grpo_s, gtpo_canonical
from verl_credit.credit.token.sepa_controller import SepaController
from verl_credit.credit.token.token_credit import TokenCredit, token_credit
from verl_credit.credit.token.token_transforms import TOKEN_OPERATORS, TRANSFORMS
from verl_credit.credit.token.uncertainty import UNCERTAINTY_KINDS, uncertainty
from verl_credit.credit.turn.anchors import exact_anchors
from verl_credit.credit.turn.info_gain import FIRST_TURN, INFO_GAIN_TYPES, InfoGain, info_gain
from verl_credit.credit.turn.mode import TurnCredit, TurnMode
from verl_credit.credit.turn.modes import MODES
from verl_credit.credit.turn.tables import Tables
from verl_credit.credit.turn.turn_credit import turn_credit
from verl_credit.credit.turn.turns import TurnTable, spread, turn_table

(
    none, joint, separate, turn_group, turn_group_v1d, turn_group_unbiased, leave_one_out,
    gigpo, hgpo, g2po, mt_grpo, progress, turn_gae,
) = MODES.values()  # fmt: skip
INFO_GAIN_NORM_MODES = tuple(MODES)
TRANSFORM_MODES = tuple(TRANSFORMS)
REGISTRY: dict[tuple[str, str], Operator] = {
    (operator.level, operator.name): operator
    for operator in (*OUTCOME_OPERATORS.values(), *MODES.values(), *TOKEN_OPERATORS, *CANONICAL.values())
}
"""Every operator by level and name."""
__all__ = [
    "AGG_MODES", "FIRST_TURN", "INFO_GAIN_NORM_MODES", "INFO_GAIN_TYPES", "RATIO_LEVELS", "STRATEGIC_GRAMS",
    "TRANSFORM_MODES", "UNCERTAINTY_KINDS", "GroupStats", "InfoGain", "SepaController", "Tables", "TokenCredit",
    "TurnCredit", "TurnMode", "TurnTable", "aggregate", "entropy_mask", "exact_anchors", "group_counts",
    "group_stats", "gtpo_weights", "hicra", "info_gain", "planning_mask",
    "sepa_amp", "sepa_amp_c", "sepa_pool", "spread", "token_credit", "turn_credit",
    "turn_policy_loss", "turn_table", "uncertainty", "z_score",
    # Bounds of an operator's options, as their annotations.
    "EPS", "AtLeastZero", "Count", "Number", "Positive", "Share",
    # The operators of the registry: a turn mode is its `TurnMode`, the others are functions. Transforms are names of
    # `token_credit`.
    "grpo", "half_negative", "low_baseline", "maxrl", "reinforce_pp", "rloo",
    "grpo_s", "gtpo_canonical",
    "g2po", "gigpo", "hgpo", "joint", "leave_one_out", "mt_grpo", "none",
    "progress", "separate", "turn_gae", "turn_group", "turn_group_unbiased", "turn_group_v1d",
]  # fmt: skip
