"""Credit assignment for multi-turn GRPO as pure functions of tensors, with torch only."""

from verl_credit.credit.groups import GroupStats, group_stats, z_score
from verl_credit.credit.loss.aggregate import AGG_MODES, aggregate
from verl_credit.credit.loss.policy_loss import turn_policy_loss
from verl_credit.credit.loss.ratio import RATIO_LEVELS
from verl_credit.credit.outcome.outcome import group_counts
from verl_credit.credit.planning.anchors import planning_mask_by_anchors
from verl_credit.credit.planning.planning import STRATEGIC_GRAMS, planning_mask
from verl_credit.credit.registry import REGISTRY
from verl_credit.credit.token.entropy_mask import entropy_mask
from verl_credit.credit.token.gtpo import gtpo_weights
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
# An operator declares itself in its own file, and its name is public here: an outcome operator and a canonical method as a
# function, a turn mode as the `TurnMode` that is called. Transforms are names of `token_credit`.
_OPERATORS = {
    name.replace("-", "_"): operator if level == "turn" else operator.function
    for (level, name), operator in REGISTRY.items()
    if level != "token"
}
globals().update(_OPERATORS)

__all__ = [
    "AGG_MODES", "FIRST_TURN", "INFO_GAIN_NORM_MODES", "INFO_GAIN_TYPES", "RATIO_LEVELS", "STRATEGIC_GRAMS",
    "TRANSFORM_MODES", "UNCERTAINTY_KINDS", "GroupStats", "InfoGain", "SepaController", "Tables", "TokenCredit",
    "TurnCredit", "TurnMode", "TurnTable", "aggregate", "entropy_mask", "exact_anchors", "group_counts",
    "group_stats", "gtpo_weights", "hicra", "info_gain", "planning_mask", "planning_mask_by_anchors",
    "sepa_amp", "sepa_amp_c", "sepa_pool", "similar_anchors", "spread", "token_credit", "turn_credit",
    "turn_policy_loss", "turn_table", "uncertainty", "z_score",
    *_OPERATORS,
]  # fmt: skip
