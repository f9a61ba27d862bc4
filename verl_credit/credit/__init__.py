"""Credit assignment for multi-turn GRPO as pure functions of tensors: torch and nothing else."""

from verl_credit.credit.aggregate import AGG_MODES, aggregate
from verl_credit.credit.entropy_mask import entropy_mask
from verl_credit.credit.groups import GroupStats, group_stats, z_score
from verl_credit.credit.grpo_s import grpo_s
from verl_credit.credit.gtpo import gtpo_weights
from verl_credit.credit.gtpo_canonical import gtpo_canonical
from verl_credit.credit.hicra import hicra
from verl_credit.credit.info_gain import FIRST_TURN, INFO_GAIN_TYPES, InfoGain, info_gain
from verl_credit.credit.maxrl import maxrl
from verl_credit.credit.modes import MODES
from verl_credit.credit.outcome import group_counts, grpo
from verl_credit.credit.planning import STRATEGIC_GRAMS, planning_mask
from verl_credit.credit.planning_anchors import planning_mask_by_anchors
from verl_credit.credit.policy_loss import turn_policy_loss
from verl_credit.credit.primitives import AdaptiveTurnClipper, InformationGain, TurnGroupNormalizer
from verl_credit.credit.ratio import RATIO_LEVELS
from verl_credit.credit.reinforce_pp import reinforce_pp
from verl_credit.credit.sepa import sepa_amp, sepa_amp_c, sepa_pool
from verl_credit.credit.sepa_controller import SepaController
from verl_credit.credit.token_credit import TokenCredit, token_credit
from verl_credit.credit.token_transforms import TRANSFORMS
from verl_credit.credit.turn_credit import TurnCredit, turn_credit
from verl_credit.credit.turns import TurnTable, spread, turn_table
from verl_credit.credit.uncertainty import UNCERTAINTY_KINDS, uncertainty

INFO_GAIN_NORM_MODES = tuple(MODES)
TRANSFORM_MODES = tuple(TRANSFORMS)

__all__ = [
    "AGG_MODES",
    "FIRST_TURN",
    "INFO_GAIN_NORM_MODES",
    "INFO_GAIN_TYPES",
    "RATIO_LEVELS",
    "STRATEGIC_GRAMS",
    "TRANSFORM_MODES",
    "UNCERTAINTY_KINDS",
    "AdaptiveTurnClipper",
    "GroupStats",
    "InfoGain",
    "InformationGain",
    "SepaController",
    "TokenCredit",
    "TurnCredit",
    "TurnGroupNormalizer",
    "TurnTable",
    "aggregate",
    "entropy_mask",
    "group_counts",
    "group_stats",
    "grpo",
    "grpo_s",
    "gtpo_canonical",
    "gtpo_weights",
    "hicra",
    "info_gain",
    "maxrl",
    "planning_mask",
    "planning_mask_by_anchors",
    "reinforce_pp",
    "sepa_amp",
    "sepa_amp_c",
    "sepa_pool",
    "spread",
    "token_credit",
    "turn_credit",
    "turn_policy_loss",
    "turn_table",
    "uncertainty",
    "z_score",
]
