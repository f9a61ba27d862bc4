"""The outcome operators: how a prompt's outcomes become an advantage per trajectory. One file each."""

from collections.abc import Mapping
from types import MappingProxyType

from verl_credit.credit.operator import Operator
from verl_credit.credit.outcome import grpo, half_negative, low_baseline, maxrl, reinforce_pp, rloo

_MODULES = (grpo, rloo, low_baseline, half_negative, maxrl, reinforce_pp)
OUTCOME_OPERATORS: Mapping[str, Operator] = MappingProxyType(
    {module.OPERATOR.name: module.OPERATOR for module in _MODULES}
)
