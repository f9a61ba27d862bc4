"""Credit assignment for multi-turn GRPO as pure functions of tensors, with torch only."""

from verl_credit.credit.groups import GroupStats, group_stats, z_score
from verl_credit.credit.loss.aggregate import AGG_MODES, aggregate
from verl_credit.credit.loss.policy_loss import turn_policy_loss
from verl_credit.credit.loss.ratio import RATIO_LEVELS
from verl_credit.credit.outcome.half_negative import half_negative
from verl_credit.credit.outcome.low_baseline import low_baseline
from verl_credit.credit.outcome.maxrl import maxrl
from verl_credit.credit.outcome.outcome import group_counts, grpo
from verl_credit.credit.outcome.reinforce_pp import reinforce_pp
from verl_credit.credit.outcome.rloo import rloo
from verl_credit.credit.planning.anchors import planning_mask_by_anchors
from verl_credit.credit.planning.planning import STRATEGIC_GRAMS, planning_mask
from verl_credit.credit.token.entropy_mask import entropy_mask
from verl_credit.credit.token.grpo_s import grpo_s
from verl_credit.credit.token.gtpo import gtpo_weights
from verl_credit.credit.token.gtpo_canonical import gtpo_canonical
from verl_credit.credit.token.hicra import hicra
from verl_credit.credit.token.sepa import sepa_amp, sepa_amp_c, sepa_pool
from verl_credit.credit.token.sepa_controller import SepaController
from verl_credit.credit.token.token_credit import TokenCredit, token_credit
from verl_credit.credit.token.token_transforms import TRANSFORMS
from verl_credit.credit.token.uncertainty import UNCERTAINTY_KINDS, uncertainty
from verl_credit.credit.turn.anchors import exact_anchors, similar_anchors
from verl_credit.credit.turn.info_gain import FIRST_TURN, INFO_GAIN_TYPES, InfoGain, info_gain
from verl_credit.credit.turn.mode import TurnCredit, TurnMode
from verl_credit.credit.turn.modes import MODES
from verl_credit.credit.turn.tables import Tables
from verl_credit.credit.turn.turn_credit import turn_credit
from verl_credit.credit.turn.turns import TurnTable, spread, turn_table

INFO_GAIN_NORM_MODES = tuple(MODES)
TRANSFORM_MODES = tuple(TRANSFORMS)
joint, separate, turn_group = MODES["joint"], MODES["separate"], MODES["turn-group"]
turn_group_v1d, turn_group_unbiased = MODES["turn-group-v1d"], MODES["turn-group-unbiased"]
gigpo, hgpo, mt_grpo, progress = (MODES[name] for name in ("gigpo", "hgpo", "mt_grpo", "progress"))
leave_one_out, turn_gae = MODES["leave_one_out"], MODES["turn_gae"]

__all__ = [
    "AGG_MODES", "FIRST_TURN", "INFO_GAIN_NORM_MODES", "INFO_GAIN_TYPES", "RATIO_LEVELS", "STRATEGIC_GRAMS",
    "TRANSFORM_MODES", "UNCERTAINTY_KINDS", "GroupStats", "InfoGain",
    "SepaController", "Tables", "TokenCredit", "TurnCredit", "TurnMode", "TurnTable",
    "aggregate", "entropy_mask", "exact_anchors", "gigpo", "group_counts", "group_stats", "grpo", "grpo_s",
    "gtpo_canonical", "gtpo_weights", "half_negative", "hgpo", "hicra", "info_gain", "joint", "leave_one_out",
    "low_baseline", "maxrl", "mt_grpo", "planning_mask", "planning_mask_by_anchors", "progress", "reinforce_pp",
    "rloo", "sepa_amp", "sepa_amp_c", "sepa_pool", "separate", "similar_anchors", "spread", "token_credit",
    "turn_credit", "turn_gae", "turn_group", "turn_group_unbiased", "turn_group_v1d", "turn_policy_loss",
    "turn_table", "uncertainty", "z_score",
]  # fmt: skip
