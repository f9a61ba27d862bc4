"""A user's own outcome operator: a function of one prompt's rewards."""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from verl_credit.credit.checks import as_group_ids, output_dtype
from verl_credit.credit.groups import valid_rows
from verl_credit.credit.plugins.lists import groups_of
from verl_credit.credit.plugins.load import required_arguments

Operator = Callable[..., torch.Tensor]
LARGEST = torch.finfo(torch.float32).max


def outcome_operator(function: Callable[..., Any], name: str, params: dict | None = None) -> Operator:
    """``operator(outcome_B, group_B, row_valid_B=None) -> advantage_B`` from a function of plain lists.

    Accepted: f(rewards), f(rewards, params), f(rewards, *, params), and a factory without arguments that returns one
    of them. ``rewards`` are the outcomes of one prompt's valid rows in row order; the function returns as many finite
    numbers. It is also called for groups of one.
    """
    call = on_lists(function, name, dict(params or {}))

    def operator(
        outcome_B: torch.Tensor, group_B: torch.Tensor, *, row_valid_B: torch.Tensor | None = None
    ) -> torch.Tensor:
        valid_B = valid_rows(outcome_B, group_B, row_valid_B)
        advantage_B = torch.zeros(outcome_B.shape, dtype=torch.float64)
        for rows in groups_of(as_group_ids("group_B", group_B), valid_B):
            rewards = outcome_B[rows].tolist()
            advantage_B[rows] = torch.tensor(_checked(call(rewards), rewards, name), dtype=torch.float64)
        return advantage_B.to(device=outcome_B.device, dtype=output_dtype(outcome_B))

    return operator


def on_lists(function: Callable[..., Any], name: str, params: dict) -> Callable[[list[float]], Any]:
    """The function with one argument: its rewards."""
    if not callable(function):
        raise ValueError(f"advantage_mode={name!r} is a {type(function).__name__}; expected a function")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError as error:
        raise ValueError(
            f"advantage_mode={name!r} has no signature; expected a function f(rewards)"
        ) from error
    if not parameters:
        return on_lists(function(), name, params)
    required = required_arguments(function)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if any(p.name == "params" and p.kind is p.KEYWORD_ONLY for p in parameters):
        return lambda rewards: function(rewards, params=dict(params))
    if len(positional) >= 2 and (positional[1].name == "params" or len(required) == 2):
        return lambda rewards: function(rewards, dict(params))
    if len(required) > 1:
        raise ValueError(
            f"advantage_mode={name!r} takes {required}; expected f(rewards) or f(rewards, params)"
        )
    if params:
        raise ValueError(f"advantage_params={params} were given, but advantage_mode={name!r} takes none")
    return lambda rewards: function(rewards)


def _checked(values: Any, rewards: list[float], name: str) -> list[float]:
    if isinstance(values, torch.Tensor):
        values = values.tolist()
    try:
        values = [float(value) for value in values]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"advantage_mode={name!r} returned {values!r}; expected a list of {len(rewards)} numbers"
        ) from error
    if len(values) != len(rewards):
        raise ValueError(
            f"advantage_mode={name!r} returned {len(values)} values for a group of {len(rewards)}"
        )
    bad = next((value for value in values if not abs(value) <= LARGEST), None)
    if bad is not None:
        raise ValueError(
            f"advantage_mode={name!r} returned {bad} for rewards {rewards}; expected finite numbers"
        )
    return values
