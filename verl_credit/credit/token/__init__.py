"""Token operators: from an advantage per turn to one per token, and the two methods that replace both levels."""

from collections.abc import Mapping
from types import MappingProxyType

from verl_credit.credit.operator import Operator
from verl_credit.credit.token import grpo_s, gtpo_canonical

CANONICAL: Mapping[str, Operator] = MappingProxyType(
    {module.OPERATOR.name: module.OPERATOR for module in (gtpo_canonical, grpo_s)}
)
