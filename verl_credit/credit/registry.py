"""Every operator by level and name, as it declares itself in its own file."""

from collections.abc import Mapping
from types import MappingProxyType

from verl_credit.credit.operator import Operator
from verl_credit.credit.outcome import OUTCOME_OPERATORS
from verl_credit.credit.token import CANONICAL
from verl_credit.credit.token.token_transforms import TOKEN_OPERATORS
from verl_credit.credit.turn.modes import MODES

REGISTRY: Mapping[tuple[str, str], Operator] = MappingProxyType(
    {
        (operator.level, operator.name): operator
        for operator in (*OUTCOME_OPERATORS.values(), *MODES.values(), *TOKEN_OPERATORS, *CANONICAL.values())
    }
)
