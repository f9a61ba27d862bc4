"""Credit assignment for multi-turn GRPO as pure functions of tensors: torch and nothing else."""

from verl_credit.credit.aggregate import AGG_MODES, aggregate
from verl_credit.credit.groups import GroupStats, group_stats, z_score
from verl_credit.credit.info_gain import FIRST_TURN, INFO_GAIN_TYPES, InfoGain, info_gain
from verl_credit.credit.modes import MODES
from verl_credit.credit.outcome import group_counts, grpo
from verl_credit.credit.policy_loss import turn_policy_loss
from verl_credit.credit.ratio import RATIO_LEVELS
from verl_credit.credit.turn_credit import TurnCredit, turn_credit
from verl_credit.credit.turns import TurnTable, spread, turn_table

INFO_GAIN_NORM_MODES = tuple(MODES)

__all__ = [
    "AGG_MODES",
    "FIRST_TURN",
    "INFO_GAIN_NORM_MODES",
    "INFO_GAIN_TYPES",
    "RATIO_LEVELS",
    "GroupStats",
    "InfoGain",
    "TurnCredit",
    "TurnTable",
    "aggregate",
    "group_counts",
    "group_stats",
    "grpo",
    "info_gain",
    "spread",
    "turn_credit",
    "turn_policy_loss",
    "turn_table",
    "z_score",
]
